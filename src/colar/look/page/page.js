// The list of questions: search, filters, one question with its chains side by side, and a link to it (#q=ID).

"use strict";

const ANY = "any";
const STEPS = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
const $ = (id) => document.getElementById(id);
const { element, rove } = ColarViewer;

function start(data) {
  const indices = data.questions.map((_, index) => index);
  const answers = (question) => data.answers.map((ofSystem) => ofSystem[question]);
  const texts = indices.map((question) => {
    const { id, context = [], question: asked, answer } = data.questions[question];
    const turns = context.map(([, text]) => text);
    return [id, ...turns, asked, answer, ...answers(question).map((each) => each.answer)].join("\n").toLowerCase();
  });
  let shown = indices;
  let open = -1;

  // Filters

  function outcomes() {
    const causes = new Set();
    for (const question of indices) {
      for (const each of answers(question)) causes.add(each.cause);
    }
    causes.delete("right");
    const made = [new Option("anything", ANY), new Option("right", "right"), new Option("not right", "not right")];
    if (causes.size > 1) for (const cause of [...causes].sort()) made.push(new Option(cause, `cause ${cause}`));
    if (data.systems.length > 1) made.push(new Option("systems disagree", "disagree"));
    return made;
  }

  function matches(question) {
    const words = $("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.every((word) => texts[question].includes(word))) return false;
    const outcome = $("outcome").value;
    if (outcome === ANY) return true;
    const all = answers(question);
    if (outcome === "disagree") return new Set(all.map((each) => each.right)).size > 1;
    const which = $("which").value;
    const asked = which === ANY ? all : [all[Number(which)]];
    const wanted = (each) => {
      if (outcome === "right") return each.right;
      if (outcome === "not right") return !each.right;
      return outcome === `cause ${each.cause}`;
    };
    return asked.some(wanted);
  }

  function filter() {
    shown = indices.filter(matches);
    $("count").textContent = `${shown.length === indices.length ? "" : `${shown.length} of `}${indices.length} question${indices.length === 1 ? "" : "s"}`;
    $("list").replaceChildren(...shown.map(item));
    markOpen();
    updateButtons();
  }

  // List

  function item(question) {
    const made = element("li");
    const button = element("button", "item");
    button.type = "button";
    button.dataset.question = question;
    button.tabIndex = -1;
    button.append(element("span", "asked", data.questions[question].question));
    const marks = element("span", "marks");
    for (const [system, each] of answers(question).entries()) {
      const mark = element("span", each.right ? "mark right" : "mark wrong", each.right ? "✓" : "✗");
      mark.title = `${data.systems[system]}: ${each.cause}`;
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", mark.title);
      marks.append(mark);
    }
    button.append(marks);
    button.addEventListener("click", () => choose(question, true));
    made.append(button);
    return made;
  }

  // The open question is the list's one tab stop, or the first of the list where it is not among them.
  function markOpen() {
    const all = [...$("list").querySelectorAll("button.item")];
    const stop = all.find((button) => Number(button.dataset.question) === open) || all[0];
    for (const button of all) {
      button.tabIndex = button === stop ? 0 : -1;
      if (Number(button.dataset.question) === open) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    return stop;
  }

  // One question

  function choose(question, link) {
    open = question;
    show(question);
    const button = markOpen();
    // Scroll the list alone: the page must not jump.
    if (button) $("list").scrollTop = Math.max(0, button.offsetTop - $("list").offsetTop - $("list").clientHeight / 3);
    if (link) keepLink(question);
  }

  function keepLink(question) {
    try {
      history.replaceState(null, "", `#q=${encodeURIComponent(data.questions[question].id)}`);
    } catch {
      // In the frame of a notebook's file viewer there is no address to keep it in.
    }
  }

  function show(question) {
    const { id, context = [], question: asked, answer, steps } = data.questions[question];
    $("id").textContent = id;
    const parts = [...context.map(([role, text]) => element("p", "turn", `${role}: ${text}`)), element("p", "asked", asked)];
    const line = element("p", "gold");
    line.append(element("span", "label", "Reference"), element("strong", "", answer));
    for (const step of steps) line.append(element("code", "", step));
    parts.push(line);
    const cards = element("div", "cards");
    const all = answers(question);
    for (const [system, each] of all.entries()) cards.append(card(system, each));
    parts.push(ColarViewer.legend(all.flatMap((each) => each.thoughts)), cards);
    $("chains").replaceChildren(...parts);
    $("question").setAttribute("aria-label", `Question ${id}`);
    updateButtons();
  }

  function card(system, given) {
    const made = element("section", "card");
    const name = data.systems[system];
    made.setAttribute("aria-label", name);
    const head = element("div", "top");
    head.append(element("h4", "", name), element("span", `badge ${given.right ? "right" : "wrong"}`, given.cause));
    const answer = element("p", "answer");
    answer.append(element("span", "label", "Answer"), element("strong", "", given.answer.trim() || "none"));
    const length = given.reference_length === null ? `${given.length} thoughts` : `${given.length} thoughts (reference ${given.reference_length})`;
    const costs = `${length} · ${given.forward_passes} forward passes · ${(1000 * given.seconds).toFixed(0)} ms`;
    made.append(head, ColarViewer.chain(given.thoughts, given.missing), answer, element("p", "costs", costs));
    return made;
  }

  function step(event, by) {
    choose(shown[shown.indexOf(open) + by], true);
    // A button that is switched off loses the focus.
    if (event.target.disabled) $("question").focus();
  }

  function updateButtons() {
    const place = shown.indexOf(open);
    $("previous").disabled = place <= 0;
    $("next").disabled = place === -1 ? shown.length === 0 : place === shown.length - 1;
  }

  // The question that the address names; null for any other address.
  function linked() {
    if (!location.hash.startsWith("#q=")) return null;
    let id;
    try {
      id = decodeURIComponent(location.hash.slice(3));
    } catch {
      return null;
    }
    const question = data.questions.findIndex((each) => each.id === id);
    return question === -1 ? null : question;
  }

  function follow() {
    const question = linked();
    if (question === null) return false;
    // A filter must not hide what a link asks for.
    if (!shown.includes(question)) {
      $("words").value = "";
      $("outcome").value = ANY;
      filter();
    }
    choose(question, false);
    $("question").scrollIntoView();
    return true;
  }

  $("which").replaceChildren(new Option("any", ANY), ...data.systems.map((system, index) => new Option(system, index)));
  $("outcome").replaceChildren(...outcomes());
  $("words").addEventListener("input", filter);
  for (const id of ["which", "outcome"]) $(id).addEventListener("change", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("previous").addEventListener("click", (event) => step(event, -1));
  $("next").addEventListener("click", (event) => step(event, 1));
  rove($("list"), "button.item", STEPS);
  addEventListener("hashchange", follow);
  filter();
  if (!follow() && shown.length) choose(shown[0], false);
}

// The data are JSON, compressed with gzip and written in base64.
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  start(await new Response(stream).json());
})();
