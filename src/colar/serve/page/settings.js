// The form's settings: read from it, written to it, and kept in the address behind the "#".

// Params that set how much a model thinks, and their names on the slider.
const SPEEDS = { compression_factor: "c", ratio: "ratio" };
// Fields of a request, and the inputs that have them.
const NUMBERS = { temperature: "temperature", seed: "seed", thinking_token_budget: "budget" };
const $ = (id) => document.getElementById(id);
const { element } = ColarViewer;

// The stops of the speed slider: {value, label, extras} each, where `extras` is what a request gets.
export function stops(model) {
  for (const [name, short] of Object.entries(SPEEDS)) {
    const values = model?.colar?.params?.[name]?.allowed;
    if (values) return values.map((value) => ({ value, label: `${short} = ${value}`, extras: { [name]: value } }));
  }
  return [];
}

// The place of a stop; a link may hold any value.
function placeOf(all, value) {
  const place = all.findIndex((stop) => String(stop.value) === String(value));
  return place < 0 ? undefined : place;
}

// The speed of a request that names none.
function ownSpeed(model) {
  const name = Object.keys(SPEEDS).find((each) => model?.colar?.params?.[each]);
  return model?.colar?.params?.[name]?.default;
}

export function chosenStop(model) {
  return stops(model)[$("speed").value];
}

// Show a model's own stops and params; what does not fit the model is left out.
export function showModel(model, wanted = {}) {
  const all = stops(model);
  $("speed-field").hidden = all.length === 0;
  $("speed").max = Math.max(0, all.length - 1);
  $("speed").value = placeOf(all, wanted.speed) ?? placeOf(all, ownSpeed(model)) ?? 0;
  $("speed-stops").replaceChildren(...all.map((_, index) => new Option("", index)));
  sayStop(model);
  showParams(model?.colar?.params || {}, wanted);
}

// A slider's own number is the place of its stop: what it means is said beside it.
export function sayStop(model) {
  const label = chosenStop(model)?.label || "";
  $("speed-value").textContent = label;
  $("speed").setAttribute("aria-valuetext", label);
}

function showParams(params, wanted) {
  const fields = [];
  for (const [name, about] of Object.entries(params)) {
    if (!(name in SPEEDS)) fields.push(paramField(name, about, wanted[name]));
  }
  $("params").replaceChildren(...fields);
}

function paramField(name, param, wanted) {
  const field = element("div", "field");
  const label = element("label", "", name.replaceAll("_", " "));
  label.htmlFor = `param-${name}`;
  let input = element("input");
  if (param.allowed?.length) {
    input = element("select");
    for (const value of param.allowed) input.append(new Option(String(value), String(value)));
  } else {
    input.type = "number";
    input.step = "any";
  }
  input.value = wanted ?? param.default ?? "";
  input.id = `param-${name}`;
  input.dataset.param = name;
  input.title = param.about || "";
  field.append(label, input);
  return field;
}

// Values of the params, by name; defaults too, for which the speed that a request has would stand otherwise.
function params() {
  const chosen = {};
  for (const input of document.querySelectorAll("[data-param]")) {
    if (input.value !== "") chosen[input.dataset.param] = Number(input.value);
  }
  return chosen;
}

// The params that are set, as the end of a run's title.
export function paramsText() {
  const set = Object.entries(params()).filter(([, value]) => value !== 0);
  return set.map(([name, value]) => `, ${name.replaceAll("_", " ")} ${value}`).join("");
}

// The body of a request, without its speed.
export function body() {
  const made = { model: $("model").value, messages: [{ role: "user", content: $("question").value }], ...params() };
  // What is left empty is the server's choice.
  for (const [name, id] of Object.entries(NUMBERS)) {
    if ($(id).value !== "") made[name] = Number($(id).value);
  }
  return made;
}

// Question and settings as the text behind the "#". The API key is no part of it.
export function toHash(model) {
  const { messages, ...rest } = body();
  const stop = chosenStop(model);
  const kept = { q: messages[0].content, ...rest };
  if (stop) kept.speed = stop.value;
  return new URLSearchParams(kept).toString();
}

export function fromHash(text) {
  return Object.fromEntries(new URLSearchParams(text.replace(/^#/, "")));
}

export function restore(wanted, models) {
  if (wanted.q !== undefined) $("question").value = wanted.q;
  if (models.some((model) => model.id === wanted.model)) $("model").value = wanted.model;
  for (const [name, id] of Object.entries(NUMBERS)) {
    if (wanted[name] !== undefined) $(id).value = wanted[name];
  }
}
