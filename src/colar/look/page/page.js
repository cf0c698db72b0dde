// Wires the page: which controls the charts show, and the questions.

"use strict";

(() => {
  const $ = (id) => document.getElementById(id);

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
