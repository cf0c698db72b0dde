// The chain viewer: thoughts as chips of their tokens. A classic script with one global, `ColarViewer`, so that a page
// opened from file:// can have it as it is. It has no state, and fetches nothing.
//
//   ColarViewer.chain(thoughts)   all thoughts; each is a button, and shows its neighbours below the chain when pressed
//   ColarViewer.chain(thoughts, missing)   with groups of the reference behind it that no thought has come to
//   ColarViewer.add(chain, one)   one more thought at the end of such a chain, for thoughts that stream in
//   ColarViewer.legend(thoughts)  what shade and bar mean; no bar where no thought has a sigma
//   ColarViewer.element(name, classes, text)   a node, for the scripts of the pages
//   ColarViewer.rove(list, selector, steps)    one tab stop for a list of buttons; keys move inside it
//
// A thought has the keys that docs/serve.md lists: index, kind, tokens, ordered, neighbours, sigma, stop_probability.
// Numbers may be null. Where it is compared with a reference chain it also has `reference`, the group's tokens
// [{text, said}], and `mark`: right, wrong, after (a wrong one), extra (there is no group). Text of a model is set as
// text, never as markup, and styles are set one by one, so that a page without inline scripts and styles can use it.
// viewer.css has the looks.

"use strict";

const ColarViewer = (() => {
  // Sigma lies between these, in units of the embeddings' spread; the bar is logarithmic.
  const SIGMA_LEAST = 0.01;
  const SIGMA_MOST = 1;
  // How a thought compares with the reference: a sign, and words for a screen reader.
  const MARKS = {
    right: ["✓", "as the reference"],
    wrong: ["✗", "wrong, the reference has"],
    after: ["≠", "differs, the reference has"],
    extra: ["+", "behind the reference's end"],
    missing: ["–", "no thought for"],
  };
  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

  function element(name, classes, text) {
    const made = document.createElement(name);
    if (classes) made.className = classes;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function isNumber(value) {
    return typeof value === "number" && Number.isFinite(value);
  }

  function clamp(value) {
    return Math.min(1, Math.max(0, value));
  }

  // A token of white space alone would be an empty chip.
  function visible(text) {
    const marked = String(text).replace(/\n/g, "↵").replace(/\t/g, "→");
    return marked.trim() === "" ? marked.replace(/ /g, "␣") || "∅" : marked;
  }

  // The shade of a token, 0 to 1: its probability where the model chose it, else its cosine to the thought.
  function shadeOf(token, ordered) {
    if (ordered && isNumber(token.logprob)) return clamp(Math.exp(token.logprob));
    return isNumber(token.cosine) ? clamp(token.cosine) : null;
  }

  function chip(token, ordered) {
    const made = element("span", "chip", visible(token.text));
    const shade = shadeOf(token, ordered);
    made.classList.toggle("plain", shade === null);
    if (shade !== null) made.style.setProperty("--shade", shade.toFixed(3));
    return made;
  }

  function sigmaBar(sigma) {
    const bar = element("span", "sigma");
    const part = Math.log(sigma / SIGMA_LEAST) / Math.log(SIGMA_MOST / SIGMA_LEAST);
    bar.style.setProperty("--part", clamp(part).toFixed(3));
    bar.title = `sigma ${sigma.toFixed(3)}`;
    return bar;
  }

  // A thought in words, for a screen reader.
  function spoken(thought) {
    const words = [];
    for (const token of thought.tokens) {
      const shade = shadeOf(token, thought.ordered);
      words.push(shade === null ? visible(token.text) : `${visible(token.text)} ${shade.toFixed(2)}`);
    }
    const sigma = isNumber(thought.sigma) ? `; sigma ${thought.sigma.toFixed(2)}` : "";
    return `Thought ${thought.index + 1}: ${words.join(", ")}${sigma}${compared(thought.mark, thought.reference)}`;
  }

  function compared(mark, reference) {
    if (!MARKS[mark]) return "";
    const group = mark === "right" ? "" : reference.map((token) => visible(token.text)).join(" ");
    return `; ${MARKS[mark][1]} ${group}`.trimEnd();
  }

  // The reference's group below a thought; tokens that the thought does not say stand out.
  function expected(mark, reference) {
    const made = element("span", `expected ${mark}`);
    made.setAttribute("aria-hidden", "true");
    made.append(element("span", "mark", MARKS[mark][0]));
    for (const token of reference) made.append(element("span", token.said ? "said" : "unsaid", visible(token.text)));
    return made;
  }

  // A group of the reference that no thought has come to.
  function missed(reference) {
    const made = element("li", "missing");
    made.append(expected("missing", reference));
    made.append(element("span", "spoken", compared("missing", reference).slice(2)));
    return made;
  }

  function row(cells, kind) {
    const made = element("tr");
    for (const text of cells) {
      const cell = element(kind, "", text);
      if (kind === "th") cell.scope = "col";
      made.append(cell);
    }
    return made;
  }

  // A table of tokens with one number each; a bar behind the number shows it.
  function table(caption, head, tokens, valueOf) {
    const made = element("table", "near");
    const body = element("tbody");
    made.append(element("caption", "", caption));
    const top = element("thead");
    top.append(row(head, "th"));
    for (const token of tokens) {
      const value = valueOf(token);
      const line = row([visible(token.text), isNumber(value) ? value.toFixed(3) : "–"], "td");
      if (isNumber(value)) line.lastChild.style.setProperty("--part", clamp(value).toFixed(3));
      body.append(line);
    }
    made.append(top, body);
    return made;
  }

  function facts(thought) {
    const parts = [`thought ${thought.index + 1}`];
    if (isNumber(thought.sigma)) parts.push(`sigma ${thought.sigma.toFixed(3)}`);
    if (isNumber(thought.stop_probability)) parts.push(`stop ${thought.stop_probability.toFixed(3)}`);
    return element("p", "facts", parts.join(" · "));
  }

  // The neighbours of one thought, and what else is known of it.
  function details(thought) {
    const panel = element("section", "details");
    panel.setAttribute("aria-label", `Thought ${thought.index + 1}`);
    const tables = element("div", "tables");
    if (thought.ordered) {
      const probability = (token) => (isNumber(token.logprob) ? Math.exp(token.logprob) : null);
      tables.append(table("chosen, in order", ["token", "probability"], thought.tokens, probability));
    }
    const near = thought.neighbours;
    if (near.length) tables.append(table("nearest tokens", ["token", "cosine"], near, (token) => token.cosine));
    panel.append(facts(thought), tables);
    return panel;
  }

  // One thought is open at a time, below the chain: the chain itself stays as it was.
  function toggle(made, button, thought) {
    const wasOpen = button.getAttribute("aria-expanded") === "true";
    for (const other of made.querySelectorAll("button.thought")) other.setAttribute("aria-expanded", "false");
    made.querySelector(".details")?.remove();
    if (wasOpen) return;
    button.setAttribute("aria-expanded", "true");
    // Made when it is asked for: a chain of a hundred thoughts has a thousand neighbours.
    made.append(details(thought));
  }

  function move(list, selector, from, step) {
    const buttons = [...list.querySelectorAll(selector)];
    const place = Math.min(buttons.length - 1, Math.max(0, buttons.indexOf(from) + step));
    buttons.forEach((button, index) => (button.tabIndex = index === place ? 0 : -1));
    buttons[place].focus();
  }

  function rove(list, selector, steps) {
    list.addEventListener("keydown", (event) => {
      const step = steps[event.key];
      if (step === undefined || !event.target.matches(selector)) return;
      event.preventDefault();
      move(list, selector, event.target, step);
    });
  }

  function add(made, thought) {
    const list = made.querySelector("ol");
    const item = element("li");
    const button = element("button", "thought");
    button.type = "button";
    button.tabIndex = list.querySelector("button.thought") ? -1 : 0;
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", spoken(thought));
    const chips = element("span", "chips");
    chips.append(...thought.tokens.map((token) => chip(token, thought.ordered)));
    button.append(chips);
    if (isNumber(thought.sigma)) button.append(sigmaBar(thought.sigma));
    if (MARKS[thought.mark]) button.append(expected(thought.mark, thought.reference));
    button.addEventListener("click", () => {
      move(made, "button.thought", button, 0);
      toggle(made, button, thought);
    });
    item.append(button);
    list.append(item);
  }

  function chain(thoughts, missing = []) {
    const made = element("div", "viewer");
    const list = element("ol", "chain");
    made.append(list);
    list.setAttribute("aria-label", "Thoughts. Arrow keys move between them, Enter shows the nearest tokens.");
    for (const thought of thoughts) add(made, thought);
    list.append(...missing.map(missed));
    rove(made, "button.thought", STEPS);
    return made;
  }

  function legend(thoughts) {
    const made = element("p", "legend");
    const scale = element("span", "scale");
    for (const shade of [0.1, 0.4, 0.7, 1]) {
      const chipOfScale = element("span", "chip", shade.toFixed(1));
      chipOfScale.style.setProperty("--shade", String(shade));
      scale.append(chipOfScale);
    }
    made.append(scale, element("span", "", "shade: cosine to the thought, or the probability of a chosen token"));
    if (thoughts.some((thought) => isNumber(thought.sigma))) {
      const bar = sigmaBar(0.2);
      bar.removeAttribute("title");
      made.append(bar, element("span", "", "bar: sigma, 0.01 to 1, logarithmic"));
    }
    return made;
  }

  return { chain, add, legend, element, rove };
})();
