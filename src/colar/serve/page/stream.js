// Talks to the server: the list of models, and one question as a stream of events.

// An error response of the server, in its own words.
export class ApiError extends Error {
  constructor(error, status, wait) {
    const message = error?.message || `the server answered with status ${status}`;
    super(wait ? `${message} (try again in ${wait} s)` : message);
    this.status = status;
  }
}

function headers(key) {
  const made = { "Content-Type": "application/json" };
  if (key) made.Authorization = `Bearer ${key}`;
  return made;
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached; is it running?", { cause: error });
  }
  if (response.ok) return response;
  // A proxy in between answers with a page of its own, not with our error object.
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error, response.status, response.headers.get("Retry-After"));
}

export async function models(key) {
  const response = await request("v1/models", { headers: headers(key) });
  const body = await response.json();
  return body.data;
}

// The `data:` of each server-sent event, as it arrives. An event ends with an empty line; chunks end anywhere.
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    // A "\r" at the very end may be half of a "\r\n".
    pending = (pending + value).replace(/\r\n/g, "\n");
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

// Ask one question. `heard` gets {thought}, {text} and at the end {finish, summary}. Resolves when the stream has ended;
// throws ApiError, or an AbortError where `signal` stopped it.
export async function ask(body, key, signal, heard) {
  const sent = { ...body, stream: true, return_thoughts: true };
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(sent), signal };
  const response = await request("v1/chat/completions", options);
  let complete = false;
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error, response.status);
    const [{ delta, finish_reason: finish }] = chunk.choices;
    for (const thought of delta.colar?.thoughts ?? []) heard({ thought });
    if (delta.content) heard({ text: delta.content });
    if (finish) heard({ finish, summary: delta.colar });
  }
  if (!complete) throw new Error("the connection was lost before the answer was complete");
}
