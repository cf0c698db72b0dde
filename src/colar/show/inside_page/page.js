// Wires the page: theme, which controls the charts show, and the questions.

"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const KEY = "colar-theme";

  function showTheme(theme) {
    document.documentElement.dataset.theme = theme;
    document.querySelector(`input[name=theme][value=${theme}]`).checked = true;
  }

  // Storage may be closed (a frame, a private window): then nothing is kept.
  function storedTheme() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function keepTheme(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // Kept for this page alone.
    }
  }

  const theme = storedTheme();
  showTheme(["light", "dark"].includes(theme) ? theme : "auto");
  $("theme").addEventListener("change", (event) => {
    showTheme(event.target.value);
    keepTheme(event.target.value);
  });

  for (const box of document.querySelectorAll("#variants input")) {
    // A control that no system has is no choice.
    box.closest("label").hidden = !document.querySelector(`#cost svg .${box.value}`);
    box.addEventListener("change", () => {
      for (const mark of document.querySelectorAll(`#cost .${box.value}`)) mark.classList.toggle("off", !box.checked);
    });
  }

  const choices = $("variants");
  if (choices) choices.hidden = !choices.querySelector("label:not([hidden])");

  ColarQuestions.start(ColarData.read());
})();
