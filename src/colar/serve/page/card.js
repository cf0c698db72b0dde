// A run: one question, asked once. Its card shows thoughts, answer and cost while they arrive.

import { ask } from "./stream.js";

const { element } = ColarViewer;

function inMilliseconds(value) {
  if (typeof value !== "number") return "–";
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export class Run {
  // `title` says how it is asked, and `note` what that means; `body` is the request.
  constructor(title, body, note = "") {
    this.title = title;
    this.body = body;
    this.thoughts = [];
    this.answer = "";
    this.finish = null;
    this.summary = {};
    this.error = null;
    this.card = element("article", "card waiting");
    this.card.append(element("h2", "", note ? `${title}, ${note}` : title));
    this.chain = ColarViewer.chain([]);
    this.answerLine = element("p", "answer");
    this.costs = element("dl", "costs");
    this.alert = element("p", "error");
    this.card.append(this.chain, this.answerLine, this.costs, this.alert);
    this.show();
  }

  get forwardPasses() {
    return this.summary.forward_passes;
  }

  get milliseconds() {
    return this.finish ? this.summary.thinking_ms + this.summary.answer_ms : undefined;
  }

  async start(key, signal) {
    this.card.classList.replace("waiting", "busy");
    this.card.setAttribute("aria-busy", "true");
    try {
      await ask(this.body, key, signal, (event) => this.hear(event));
    } catch (error) {
      this.error = error.name === "AbortError" ? "Stopped." : error.message;
      this.alert.setAttribute("role", "alert");
      this.alert.textContent = this.error;
    } finally {
      this.card.classList.remove("busy");
      this.card.removeAttribute("aria-busy");
      this.show();
    }
  }

  hear(event) {
    if (event.thought) {
      this.thoughts.push(event.thought);
      ColarViewer.add(this.chain, event.thought);
    }
    if (event.text) this.answer += event.text;
    if (event.finish) {
      this.finish = event.finish;
      this.summary = event.summary;
    }
    this.show();
  }

  show() {
    this.answerLine.replaceChildren();
    if (this.answer) this.answerLine.append(element("span", "label", "Answer"), element("strong", "", this.answer));
    if (this.finish && !this.answer && !this.error) this.answerLine.append(element("span", "label", "No answer"));
    if (this.summary.finish === "length") this.answerLine.append(element("span", "cut", "cut at a limit"));
    const costs = [
      ["thoughts", String(this.thoughts.length)],
      ["forward passes", String(this.forwardPasses ?? "–")],
      ["thinking", inMilliseconds(this.summary.thinking_ms)],
      ["answering", inMilliseconds(this.summary.answer_ms)],
    ];
    this.costs.replaceChildren();
    for (const [name, value] of costs) {
      const pair = element("div");
      pair.append(element("dt", "", name), element("dd", "", value));
      this.costs.append(pair);
    }
  }

  // What a screen reader says when it has ended.
  spoken() {
    if (this.error || !this.finish) return "";
    const count = this.thoughts.length;
    const answer = this.answer.trim();
    return `${this.title}: ${count} thought${count === 1 ? "" : "s"}, ${answer ? `answer ${answer}` : "no answer"}.`;
  }

  // Its line in the table; `most` are the largest numbers of the table, for the bars.
  line(most) {
    const row = element("tr");
    const name = element("th", "", this.title);
    name.scope = "row";
    row.append(name);
    const cells = [
      [this.thoughts.length, String(this.thoughts.length), most.thoughts],
      [this.forwardPasses, String(this.forwardPasses ?? "–"), most.passes],
      [this.milliseconds, inMilliseconds(this.milliseconds), most.milliseconds],
    ];
    for (const [value, text, largest] of cells) {
      const cell = element("td", "bar", text);
      if (value !== undefined && largest > 0) cell.style.setProperty("--part", (value / largest).toFixed(3));
      row.append(cell);
    }
    row.append(element("td", "", this.error ? "–" : this.answer));
    return row;
  }
}
