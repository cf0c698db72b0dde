// The page's data, as embedded.py packs it: `ColarData.read()`. Thoughts become objects when a question is opened.

"use strict";

const ColarData = (() => {
  const MARKS = [null, "right", "wrong", "after", "extra"];

  function group(flat, tokens) {
    const found = [];
    for (let i = 0; i < flat.length; i += 2) found.push({ text: tokens[flat[i]], said: flat[i + 1] === 1 });
    return found;
  }

  function thought(packed, index, tokens, c) {
    const [kind, own, near, sigma, stop, mark, reference] = packed;
    const neighbours = [];
    for (let i = 0; i < near.length; i += 2) neighbours.push({ text: tokens[near[i]], cosine: near[i + 1] });
    let chosen = [];
    if (kind === 0) chosen = neighbours.slice(0, own);
    else for (let i = 0; i < own.length; i += 3) chosen.push({ text: tokens[own[i]], cosine: own[i + 1], logprob: own[i + 2] });
    return {
      index,
      kind: kind === 1 ? "token" : "latent",
      ordered: kind !== 0,
      tokens: chosen,
      neighbours,
      sigma,
      stop_probability: stop,
      compression_factor: c,
      mark: MARKS[mark],
      reference: group(reference, tokens),
    };
  }

  // {questions, systems, chain(system, question)}: numbers of both; `chain.thoughts()` and `chain.missing()` unpack.
  function read() {
    const data = JSON.parse(document.getElementById("data").textContent);
    const chain = (system, question) => {
      const packed = data.chains[system][question];
      return {
        answer: packed.a,
        right: packed.r,
        cause: packed.w,
        length: packed.n,
        passes: packed.f,
        seconds: packed.s,
        referenceLength: packed.g,
        thoughts: () => packed.t.map((each, index) => thought(each, index, data.tokens, data.systems[system].c)),
        missing: () => packed.m.map((each) => group(each, data.tokens)),
      };
    };
    return { questions: data.questions, systems: data.systems, chain };
  }

  return { read };
})();
