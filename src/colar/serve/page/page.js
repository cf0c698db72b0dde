// Wires the page: form, link, and the runs of a question.

import { Run } from "./card.js";
import * as settings from "./settings.js";
import { models } from "./stream.js";

const $ = (id) => document.getElementById(id);
const COMPARED = [1, 2, 5];
const KEY = "colar-api-key";

const state = { models: [], asking: null, restored: false };

function chosenModel() {
  return state.models.find((model) => model.id === $("model").value);
}

function say(text) {
  $("status").textContent = text;
}

function complain(text) {
  $("error").textContent = text;
}

// The runs of a comparison: the slowest speeds first, and a chain of tokens last.
function compared(model) {
  const stops = settings.stops(model);
  let chosen = stops.filter((stop) => stop.extras.compression_factor && COMPARED.includes(stop.value));
  if (chosen.length < 2) chosen = [...new Set([stops[0], stops[stops.length >> 1], stops.at(-1)])].filter(Boolean);
  const body = settings.body();
  const runs = [];
  for (const { label, extras } of chosen) {
    const note = extras.compression_factor === 1 ? "a token a thought" : "";
    runs.push(new Run(label + settings.paramsText(), { ...body, ...extras }, note));
  }
  const cot = state.models.find((other) => other.colar?.method === "cot");
  if (cot) runs.push(new Run(`CoT (${cot.id})`, forModel(body, cot)));
  if (!runs.length) runs.push(new Run(model.id, body));
  return runs;
}

// A body for another model: without what that model's method does not take.
function forModel(body, model) {
  const made = { ...body, model: model.id };
  for (const input of document.querySelectorAll("[data-param]")) {
    if (!(input.dataset.param in (model.colar?.params || {}))) delete made[input.dataset.param];
  }
  return made;
}

function asked(model) {
  const stop = settings.chosenStop(model);
  const title = stop ? `${model.id}, ${stop.label}` : model.id;
  return [new Run(title + settings.paramsText(), { ...settings.body(), ...(stop?.extras || {}) })];
}

async function start(makeRuns) {
  complain("");
  const model = chosenModel();
  // A field that is wrong must be seen to be mended.
  if ($("more").querySelector(":invalid")) $("more").open = true;
  if (!$("form").reportValidity()) return;
  if (!model) {
    complain("No model to ask: the list of models could not be read.");
    return;
  }
  state.asking?.abort();
  const asking = new AbortController();
  state.asking = asking;
  const runs = makeRuns(model);
  history.replaceState(null, "", `#${settings.toHash(model)}`);
  $("runs").replaceChildren(...runs.map((run) => run.card));
  $("runs").classList.toggle("several", runs.length > 1);
  $("legend").replaceChildren();
  busy(true);
  // One after another: the milliseconds are then those of one question alone.
  for (const run of runs) {
    if (asking.signal.aborted) break;
    say(`${run.title}: thinking…`);
    await run.start($("key").value, asking.signal);
    if (state.asking !== asking) return;
    summarise(runs);
  }
  say(asking.signal.aborted ? "Stopped." : runs.map((run) => run.spoken()).join(" "));
  state.asking = null;
  busy(false);
}

function busy(is) {
  // A button that is switched off loses the focus: it goes to where one asks again.
  if (!is && document.activeElement === $("stop")) $("ask").focus();
  $("stop").disabled = !is;
  $("runs").setAttribute("aria-busy", String(is));
}

function summarise(runs) {
  const ended = runs.filter((run) => run.finish || run.error);
  const largest = (values) => Math.max(0, ...values.filter((value) => value !== undefined));
  const most = {
    thoughts: largest(ended.map((run) => run.thoughts.length)),
    passes: largest(ended.map((run) => run.forwardPasses)),
    milliseconds: largest(ended.map((run) => run.milliseconds)),
  };
  $("legend").replaceChildren(ColarViewer.legend(runs.flatMap((run) => run.thoughts)));
  $("summary").hidden = runs.length < 2;
  $("summary").querySelector("tbody").replaceChildren(...ended.map((run) => run.line(most)));
}

async function readModels() {
  complain("");
  try {
    state.models = await models($("key").value);
  } catch (error) {
    state.models = [];
    const needsKey = error.status === 401;
    if (needsKey) $("more").open = true;
    complain(needsKey ? "This server wants an API key: enter it below “More settings”." : `Models: ${error.message}`);
  }
  // Another key may show other models; what the user has set meanwhile stays.
  const before = state.restored ? settings.toHash(chosenModel()) : location.hash;
  state.restored = state.models.length > 0;
  $("model").replaceChildren(...state.models.map((model) => new Option(model.id, model.id)));
  restore(before);
}

function restore(hash) {
  const wanted = settings.fromHash(hash);
  settings.restore(wanted, state.models);
  const model = chosenModel();
  settings.showModel(model, wanted);
  $("budget").placeholder = model?.colar?.max_latents ?? "";
}

// Where a policy closes the storage, a reloaded page asks for the key again.
function storage() {
  try {
    return sessionStorage;
  } catch {
    return null;
  }
}

function wire() {
  $("key").value = storage()?.getItem(KEY) ?? "";
  $("key").addEventListener("change", () => {
    storage()?.setItem(KEY, $("key").value);
    readModels();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    start(asked);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  $("compare").addEventListener("click", () => start(compared));
  $("stop").addEventListener("click", () => state.asking?.abort());
  $("model").addEventListener("change", () => settings.showModel(chosenModel()));
  $("speed").addEventListener("input", () => settings.sayStop(chosenModel()));
  addEventListener("hashchange", () => restore(location.hash));
}

wire();
await readModels();
