// The form's settings: read from it, written to it, and kept in the address behind the "#".

const EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh"];
const BY = ["factor", "effort"];
// Fields of a request, and the inputs that have them.
const NUMBERS = { temperature: "temperature", seed: "seed", thinking_token_budget: "budget" };
const $ = (id) => document.getElementById(id);

// The stops of the speed slider: {label, extras} each, where `extras` is what a request gets.
export function factorsOf(model) {
  return model?.colar?.params?.compression_factor?.allowed || [];
}

export function stops(model, by) {
  const known = model?.colar || {};
  if (by === "effort") {
    const names = EFFORTS.filter((name) => known.efforts && name in known.efforts);
    // Every model can answer at once: that alone is no choice of speeds.
    if (names.join() === "none") return [];
    return names.map((name) => ({ value: name, label: name, extras: { reasoning_effort: name } }));
  }
  return factorsOf(model).map((c) => ({ value: String(c), label: `c = ${c}`, extras: { compression_factor: c } }));
}

export function by() {
  return document.querySelector("input[name=by]:checked").value;
}

// Show a model's own stops and params; what does not fit the model is left out.
export function showModel(model, wanted = {}) {
  const known = model?.colar || {};
  const efforts = stops(model, "effort");
  $("by-field").hidden = !efforts.length || !factorsOf(model).length;
  // A link may hold anything.
  if (BY.includes(wanted.by) && stops(model, wanted.by).length) check(wanted.by);
  if (!stops(model, by()).length) check(efforts.length ? "effort" : "factor");
  showStops(model, wanted.speed);
  showParams(known.params || {}, wanted);
}

function check(value) {
  document.querySelector(`input[name=by][value=${value}]`).checked = true;
}

export function showStops(model, wanted) {
  const all = stops(model, by());
  $("speed-field").hidden = all.length === 0;
  $("speed").max = Math.max(0, all.length - 1);
  const place = all.findIndex((stop) => stop.value === wanted);
  const medium = all.findIndex((stop) => stop.value === "medium");
  const usual = medium >= 0 ? medium : Math.floor((all.length - 1) / 2);
  $("speed").value = Math.max(0, place >= 0 ? place : usual);
  $("speed-stops").replaceChildren(
    ...all.map((_, index) => Object.assign(document.createElement("option"), { value: index })),
  );
  sayStop(model);
}

// A slider's own number is the place of its stop: what it means is said beside it.
export function sayStop(model) {
  const stop = stops(model, by())[$("speed").value];
  $("speed-value").textContent = stop?.label || "";
  $("speed").setAttribute("aria-valuetext", stop?.label || "");
}

function showParams(params, wanted) {
  const fields = [];
  for (const [name, about] of Object.entries(params)) {
    if (name !== "compression_factor") fields.push(paramField(name, about, wanted[name]));
  }
  $("params").replaceChildren(...fields);
}

function paramField(name, param, wanted) {
  const field = Object.assign(document.createElement("div"), { className: "field" });
  const label = document.createElement("label");
  label.textContent = name.replaceAll("_", " ");
  label.htmlFor = `param-${name}`;
  let input = document.createElement("input");
  if (param.allowed?.length && typeof param.default !== "boolean") {
    input = document.createElement("select");
    for (const value of param.allowed) input.append(new Option(String(value), String(value)));
    input.value = String(wanted ?? param.default);
  } else if (typeof param.default === "boolean") {
    input.type = "checkbox";
    input.checked = wanted === undefined ? param.default : wanted === "true";
  } else {
    input.type = typeof param.default === "number" ? "number" : "text";
    if (input.type === "number") input.step = "any";
    input.value = wanted ?? param.default ?? "";
  }
  input.id = `param-${name}`;
  input.dataset.param = name;
  input.dataset.default = JSON.stringify(param.default ?? null);
  input.title = param.about || "";
  field.append(label, input);
  return field;
}

// Values of the params that differ from their defaults, by name.
function params() {
  const chosen = {};
  for (const input of document.querySelectorAll("[data-param]")) {
    const usual = JSON.parse(input.dataset.default);
    const raw = input.type === "checkbox" ? input.checked : input.value;
    if (raw === "" || String(raw) === String(usual)) continue;
    chosen[input.dataset.param] = typeof usual === "string" || typeof raw === "boolean" ? raw : Number(raw);
  }
  return chosen;
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
  const stop = stops(model, by())[$("speed").value];
  const kept = { q: messages[0].content, by: by(), ...rest };
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
