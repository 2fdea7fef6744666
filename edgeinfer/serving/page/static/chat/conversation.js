// A chat in progress: opens chats, sends and edits messages, streams responses, switches between branches.

import { get, send } from "../api.js";
import { announce, byId, el, showAlert } from "../dom.js";
import { MessageView } from "./messages.js";
import { ResponseSaver, streamInto } from "./streaming.js";
import { promptMessages, Tree } from "./tree.js";

const MAX_ROUNDS = 20; // responses with tool calls to one message
const MAX_ANNOUNCED = 300; // characters of a result that screen readers read
const FOLLOW_MILLISECONDS = 500;
const MAX_FOLLOWED = 20; // times that a response of another page is read again

export class Conversation {
  // `host` has what the page shows besides the messages: model(), settings(), tools, changed(), composer,
  // note(text, speed) and welcome().
  constructor(host) {
    this.host = host;
    this.running = null;
    this.clear();
  }

  clear() {
    this.chat = null;
    this.tree = new Tree();
    this.tip = null;
    this.editing = null;
    this.system = null;
    this.views = new Map();
  }

  get title() {
    return this.chat === null ? "New chat" : this.chat.name ?? (this.chat.title || "Chat");
  }

  get branch() {
    return this.tree.branch(this.tip);
  }

  // Begins a new chat, which is stored with its first message.
  async startNew(system) {
    await this.stop();
    this.clear();
    this.system = system;
    this.host.composer.showEditing(false);
    this.show();
    this.host.changed();
  }

  // Opens a saved chat, on the branch of a message if one is given.
  async open(id, message = null) {
    await this.stop();
    if (message !== null) await send("PATCH", `/page/chats/${id}`, { tip: message });
    const { tree, ...chat } = await get(`/page/chats/${id}`);
    this.clear();
    Object.assign(this, { chat, tree: new Tree(tree), tip: chat.tip, system: chat.system });
    this.host.composer.showEditing(false);
    this.show();
    this.host.changed();
    this.#follow(this.tree.byId.get(this.tip));
  }

  // A response that isn't complete yet may still be saved by the page that is being left, or by another one: shows
  // what is saved of it, for some seconds.
  #follow(message, times = MAX_FOLLOWED) {
    if (message?.state !== "coming" || times === 0) return;
    setTimeout(async () => {
      const isShown = () => this.tree.byId.get(message.id) === message && this.running === null;
      if (!isShown()) return;
      const { tree } = await get(`/page/chats/${this.chat.id}`);
      if (!isShown()) return;
      Object.assign(message, tree.find((saved) => saved.id === message.id));
      this.views.get(message.id)?.update(true);
      this.#follow(message, times - 1);
    }, FOLLOW_MILLISECONDS);
  }

  // Shows the current branch.
  show() {
    const transcript = byId("transcript");
    const branch = this.branch;
    const before = this.views;
    this.views = new Map(branch.map((message) => [message.id, this.#view(message, before.get(message.id))]));
    const nodes = branch.length > 0 ? [...this.views.values()].map((view) => view.node) : [this.host.welcome()];
    const hadFocus = transcript.contains(document.activeElement);
    transcript.replaceChildren(...nodes);
    transcript.scrollTop = transcript.scrollHeight;
    if (hadFocus) this.host.composer.focus();
  }

  // A view that shows the same message and as many versions is used again: what is unfolded in it stays so.
  #view(message, before) {
    const alternatives = this.tree.alternatives(message);
    if (before?.message === message && before.count === alternatives.length) return before;
    const speaker = { user: "You", tool: "Tools" }[message.role] ?? this.host.model();
    return new MessageView(message, speaker, alternatives.indexOf(message) + 1, alternatives.length, {
      edit: (one) => this.edit(one),
      regenerate: (one) => this.regenerate(one),
      step: (one, by) => this.step(one, by),
    });
  }

  #append(message) {
    this.tree.add(message);
    this.tip = message.id;
    this.show();
  }

  // Sends a message, or the edited version of one. Returns false if it wasn't stored.
  async send(text) {
    if (!(await this.#isFree())) return false;
    const parent = this.editing === null ? this.tip : this.editing.parent;
    try {
      if (this.chat === null) {
        this.chat = await send("POST", "/page/chats", { model: this.host.model(), system: this.system ?? "" });
      }
      const message = await send("POST", `/page/chats/${this.chat.id}/messages`, { role: "user", content: text, parent });
      this.chat.title ||= message.written.trim().split("\n")[0].slice(0, 60);
      this.cancelEdit();
      this.#append(message);
    } catch (error) {
      showAlert(error.message);
      return false;
    }
    this.host.changed();
    this.respond(this.tree.byId.get(this.tip));
    return true;
  }

  // Whether no response is being generated; one that is complete is saved first.
  async #isFree() {
    if (this.running?.isComplete) await this.running.done;
    if (this.running) showAlert("a response is being generated; Esc stops it");
    return !this.running;
  }

  async edit(message) {
    if (!(await this.#isFree())) return;
    this.editing = message;
    this.host.composer.set(message.content);
    this.host.composer.showEditing(true);
    this.host.composer.focus();
  }

  cancelEdit() {
    if (this.editing === null) return false;
    this.editing = null;
    this.host.composer.set("");
    this.host.composer.showEditing(false);
    return true;
  }

  editLast() {
    const last = this.branch.findLast((message) => message.role === "user");
    if (last) this.edit(last);
  }

  // Generates another response as an alternative of `response`, or of the last one.
  async regenerate(response = null) {
    const last = response ?? this.branch.findLast((one) => one.role === "assistant");
    const at = last ? this.tree.byId.get(last.parent) : this.branch.at(-1);
    if (at && (await this.#isFree())) this.respond(at);
  }

  // Goes to the branch of another alternative of a message.
  async step(message, by) {
    if (!(await this.#isFree())) return;
    const alternatives = this.tree.alternatives(message);
    const other = alternatives[alternatives.indexOf(message) + by];
    if (!other) return;
    this.tip = this.tree.newestEnd(other).id;
    this.show();
    const group = this.views.get(other.id).node.querySelector(".versions");
    [...group.querySelectorAll("button")].find((one) => !one.disabled)?.focus();
    this.views.get(other.id).node.scrollIntoView({ block: "nearest" });
    announce(group.getAttribute("aria-label"));
    try {
      await send("PATCH", `/page/chats/${this.chat.id}`, { tip: this.tip });
    } catch (error) {
      showAlert(error.message);
    }
  }

  // Streams the response to a message.
  async respond(message) {
    const abort = new AbortController();
    const ended = () => {
      this.running = null;
      this.host.composer.showRunning(false);
    };
    this.running = { abort, isComplete: false, done: null };
    this.host.composer.showRunning(true);
    this.running.done = this.#rounds(message, abort).catch((error) => showAlert(error.message)).then(ended);
    await this.running.done;
    this.host.changed();
  }

  // Generates responses until one calls no tool, with the results of the calls of each.
  async #rounds(message, abort) {
    for (let round = 0; round < MAX_ROUNDS; round++) {
      const response = await this.#respond(message, abort);
      const calls = response.calls.filter((call) => typeof call.arguments === "object");
      if (response.state !== "whole" || calls.length === 0 || this.host.tools.schemas.length === 0) return;
      this.running.isComplete = false;
      this.host.note("calling tools …");
      let results;
      try {
        results = await this.host.tools.results(calls, abort.signal);
      } catch (error) {
        if (error.name === "AbortError") return;
        throw error;
      }
      const entry = { role: "tool", parent: response.id, results };
      message = await send("POST", `/page/chats/${this.chat.id}/messages`, entry);
      this.#append(message);
      results.forEach(({ name, content }) => announce(`Result of ${name}: ${content.slice(0, MAX_ANNOUNCED)}`));
    }
    showAlert(`stopped after ${MAX_ROUNDS} responses with tool calls`);
  }

  // Streams one response; returns it once it is saved.
  async #respond(message, abort) {
    const started = { role: "assistant", content: "", state: "coming", parent: message.id };
    const response = await send("POST", `/page/chats/${this.chat.id}/messages`, started);
    const before = this.tree.branch(message.id);
    this.#append(response);
    const view = this.views.get(response.id);
    view.update(false);
    const saver = new ResponseSaver(response);
    const reader = new Reader();
    this.host.note("waiting for the model …");
    const painter = new Painter(() => {
      this.host.note("");
      view.update(false);
      reader.read(response.content);
    });
    let failure = null;
    try {
      const { schemas } = this.host.tools;
      const tools = schemas.length > 0 ? { tools: schemas } : {};
      const messages = promptMessages(before, this.system);
      const body = { ...this.#settings(response), ...tools, model: this.host.model(), messages };
      const end = await streamInto(response, body, abort.signal, () => {
        painter.request();
        saver.changed();
      });
      response.state = "whole";
      this.host.note(noteOf(end, schemas.length > 0), speedOf(end));
    } catch (error) {
      response.state = error.name === "AbortError" ? "stopped" : "failed";
      failure = error.name === "AbortError" ? null : error.message;
      this.host.note("");
    }
    painter.stop();
    this.running.isComplete = true;
    view.update(true, failure);
    reader.end(response.content, failure ?? (response.state === "stopped" ? "Stopped." : "End of the response."));
    await saver.finish(response.state);
    if (saver.failure) showAlert(`this response isn't on the disk: ${saver.failure}`);
    return response;
  }

  // The seed is increased by one for each further response to a message.
  #settings(response) {
    const settings = this.host.settings();
    if (settings.seed === undefined) return settings;
    return { ...settings, seed: settings.seed + this.tree.alternatives(response).length - 1 };
  }

  // Stops the response in progress; resolves once its text is saved.
  async stop() {
    if (!this.running) return false;
    const { abort, done } = this.running;
    abort.abort();
    await done;
    return true;
  }
}

// Draws at most once a frame, and keeps the end in view unless the user scrolled up.
class Painter {
  constructor(draw) {
    Object.assign(this, { draw, frame: 0 });
  }

  request() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const transcript = byId("transcript");
      const isAtEnd = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 80;
      this.draw();
      if (isAtEnd) transcript.scrollTop = transcript.scrollHeight;
    });
  }

  stop() {
    cancelAnimationFrame(this.frame);
  }
}

// Passes a response to screen readers in paragraphs.
class Reader {
  constructor() {
    this.done = 0;
  }

  read(text) {
    const end = text.lastIndexOf("\n\n");
    if (end > this.done) this.#announce(text, end);
  }

  end(text, note) {
    this.#announce(text, text.length);
    announce(note);
  }

  #announce(text, end) {
    const paragraphs = text.slice(this.done, end).split(/\n\s*\n/);
    paragraphs.map((one) => one.trim()).filter(Boolean).forEach(announce);
    this.done = end;
  }
}

const shownRate = (rate) => (rate < 10 ? rate.toFixed(1) : Math.round(rate));

// For example: 54 tokens/s, first token 0.2 s.
function speedOf({ timings }) {
  const first = timings.seconds_to_first_token;
  const shown = first < 0.05 ? `${Math.round(first * 1000)} ms` : `${first.toFixed(1)} s`;
  const rate = timings.decode_tokens_per_second;
  return `${rate > 0 ? `${shownRate(rate)} tokens/s, ` : ""}first token ${shown}`;
}

function noteOf({ usage, context, dropped_messages: dropped, finish, tools }, wantsTools) {
  const parts = [`context ${usage.total_tokens.toLocaleString("en")} of ${context.toLocaleString("en")}`];
  if (finish === "length") parts.push("stopped at the most tokens");
  if (finish === "context") parts.push("the context is full: the response ends here");
  if (dropped > 0) parts.push(`${dropped} oldest messages were dropped, they don't fit the context`);
  if (wantsTools && !tools) parts.push("this model's chat template has no tools");
  return parts.join("; ");
}

// The page before the first message: the model, and prompts to try.
export function welcomeNode(name, verdict, prompts, fill) {
  const buttons = prompts.map((prompt) => el("li", {}, el("button", { type: "button", click: () => fill(prompt) }, prompt)));
  return el("div", { class: "welcome" }, el("h2", {}, name), el("p", { class: "dim" }, verdict), el("ul", {}, ...buttons));
}
