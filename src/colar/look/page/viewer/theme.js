// The switch for the theme, of any page that has a fieldset #theme with inputs auto, light and dark.

"use strict";

(() => {
  const KEY = "colar-theme";

  function show(theme) {
    document.documentElement.dataset.theme = theme;
    document.querySelector(`input[name=theme][value=${theme}]`).checked = true;
  }

  // Storage may be closed (a frame, a private window, a policy): then nothing is kept.
  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function keep(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Kept for this page alone.
    }
  }

  const theme = stored();
  show(["light", "dark"].includes(theme) ? theme : "auto");
  document.getElementById("theme").addEventListener("change", (event) => {
    show(event.target.value);
    keep(event.target.value);
  });
})();
