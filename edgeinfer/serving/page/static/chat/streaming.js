// Streams a response into a message, and saves it to the chat store as it comes.

import { ApiError, events, request, send } from "../api.js";

const SAVE_MILLISECONDS = 1000;
const MAX_KEEPALIVE = 60000; // a browser's limit for requests of a page that is being closed, in bytes

// Saves a response about once a second. If the page is closed, the text so far is kept.
export class ResponseSaver {
  constructor(message) {
    Object.assign(this, { message, timer: 0, last: Promise.resolve(), failure: null });
    this.isLeaving = false; // a browser may end the response's connection before `pagehide`
    this.leaving = () => (this.isLeaving = true);
    this.leave = () => this.#save("stopped", { keepalive: true });
    addEventListener("beforeunload", this.leaving);
    addEventListener("pagehide", this.leave);
  }

  changed() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      this.last = this.last.then(() => this.#save("coming"));
    }, SAVE_MILLISECONDS);
  }

  async finish(state) {
    if (this.isLeaving && state === "failed") return;
    clearTimeout(this.timer);
    removeEventListener("beforeunload", this.leaving);
    removeEventListener("pagehide", this.leave);
    await this.last;
    await this.#save(state);
  }

  async #save(state, extra = {}) {
    const { id, content, reasoning, calls } = this.message;
    const complete = (calls ?? []).filter((call) => typeof call.arguments === "object");
    const body = { content, reasoning, state, calls: complete.map((call) => ({ name: call.name, arguments: call.arguments })) };
    if (extra.keepalive && JSON.stringify(body).length > MAX_KEEPALIVE) return;
    try {
      await send("PUT", `/page/messages/${id}`, body, extra);
      this.failure = null;
    } catch (error) {
      this.failure = error.message;
    }
  }
}

// Streams a completion into `message`; `changed` is called after each piece. Resolves to the last event, which
// has the speed. Throws ApiError, or AbortError once `signal` is aborted.
export async function streamInto(message, body, signal, changed) {
  const response = await request("POST", "/page/completions", body, { signal });
  let end = null;
  for await (const event of events(response)) {
    if (event.timings) end = event;
    const choice = event.choices[0];
    if (!choice) continue;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    message.content += content ?? "";
    message.reasoning += reasoning ?? "";
    (calls ?? []).forEach((piece) => addCallPiece(message, piece));
    changed();
  }
  if (end === null) throw new ApiError("the response has no end", 0);
  return end;
}

function addCallPiece(message, { index, function: piece }) {
  const call = (message.calls[index] ??= { name: "", text: "", arguments: "" });
  call.name += piece.name ?? "";
  call.text += piece.arguments ?? "";
  try {
    call.arguments = JSON.parse(call.text);
  } catch {
    call.arguments = call.text;
  }
}
