// One message on the page: speaker, versions, actions, text; of a response also reasoning and tool calls.

import { button, copyText, el } from "../dom.js";
import { MarkdownView } from "./markdown.js";

const STATES = { coming: "cut off", stopped: "stopped", failed: "failed" };
const MAX_VALUE = 500; // characters of a call's argument that are shown

export class MessageView {
  // `actions`: edit, regenerate and step, called with the message.
  constructor(message, speaker, number, count, actions) {
    this.message = message;
    this.count = count;
    this.isResponse = message.role === "assistant";
    this.isUsers = message.role === "user";
    this.head = this.#head(speaker, number, count, actions);
    this.body = el("div", { class: "body" });
    this.failure = el("p", { class: "failure", hidden: true });
    this.node = el("article", { class: message.role, "aria-label": `${speaker}, message` }, this.head, this.body, this.failure);
    if (this.isResponse) this.#startResponse();
    else if (this.isUsers) this.#showMessage();
    else this.#showResults();
    this.update(true);
  }

  #head(speaker, number, count, { edit, regenerate, step }) {
    const message = this.message;
    const copy = button("Copy", async () => {
      await copyText(message.content);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    const again = this.isResponse
      ? button("Regenerate", () => regenerate(message), { class: "again" })
      : this.isUsers
        ? button("Edit", () => edit(message), { class: "edit" })
        : null;
    this.stateNote = el("span", { class: "state" });
    const versions = count > 1 ? this.#versions(number, count, step) : null;
    const actions = el("span", { class: "actions" }, again, this.isResponse || this.isUsers ? copy : null);
    return el("header", {}, el("h2", {}, speaker), versions, this.stateNote, actions);
  }

  #versions(number, count, step) {
    const what = this.isResponse ? "response" : "version";
    const arrow = (text, by, label, usable) =>
      button(text, () => step(this.message, by), { class: "icon", "aria-label": label, disabled: !usable });
    return el(
      "span",
      { class: "versions", role: "group", "aria-label": `${what} ${number} of ${count}` },
      arrow("‹", -1, `Previous ${what}`, number > 1),
      el("span", {}, `${number}/${count}`),
      arrow("›", 1, `Next ${what}`, number < count),
    );
  }

  // What the user typed, and each attached file folded.
  #showMessage() {
    const { content, written } = this.message;
    this.body.append(el("p", { class: "written" }, (written ?? content).trim()));
    const attached = content.slice((written ?? content).length).trim();
    if (attached) {
      const names = [...attached.matchAll(/^([^\n]+):\n`{3,}/gm)].map((match) => match[1]);
      const label = `Attached: ${names.join(", ") || "a file"}`;
      this.body.append(el("details", {}, el("summary", {}, label), el("pre", { tabindex: 0, "aria-label": label }, attached)));
    }
  }

  // The results of tool calls, each folded.
  #showResults() {
    for (const { name, content } of this.message.results) {
      const head = el("summary", {}, "result of ", el("code", {}, name));
      this.body.append(el("details", {}, head, el("pre", { tabindex: 0, "aria-label": `Result of ${name}` }, content)));
    }
  }

  #startResponse() {
    this.reasoningHead = el("summary");
    this.reasoningText = el("p", { class: "reasoning-text" });
    this.reasoning = el("details", { class: "reasoning", hidden: true }, this.reasoningHead, this.reasoningText);
    this.text = el("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.text);
    this.calls = el("ul", { class: "calls", "aria-label": "Tool calls", hidden: true });
    this.body.append(this.reasoning, this.text, this.calls);
  }

  // Shows the message's text so far; `ended`: there will be no more.
  update(ended, failure = null) {
    const message = this.message;
    this.node.setAttribute("aria-busy", String(!ended));
    this.node.classList.toggle("coming", !ended);
    this.stateNote.textContent = ended && this.isResponse ? STATES[message.state] ?? "" : "";
    if (failure) {
      this.failure.textContent = failure;
      this.failure.hidden = false;
    }
    if (!this.isResponse) return;
    if (message.reasoning) {
      const words = message.reasoning.trim().split(/\s+/).length;
      const thinking = !ended && !message.content && !message.calls?.length;
      this.reasoning.hidden = false;
      this.reasoningHead.textContent = `${thinking ? "Thinking …" : "Reasoning"} (${words} words)`;
      this.reasoningText.textContent = message.reasoning.trim();
    }
    this.markdown.show(message.content);
    this.#showCalls(message.calls ?? []);
  }

  #showCalls(calls) {
    this.calls.hidden = calls.length === 0;
    this.calls.replaceChildren(...calls.map((call) => el("li", {}, "tool call: ", el("code", {}, callLine(call)))));
  }
}

// For example: get_weather(city="Zurich", days=2).
export function callLine({ name, arguments: values }) {
  if (typeof values === "string") return `${name}(${values} …`;
  const shown = Object.entries(values ?? {}).map(([key, value]) => {
    const text = JSON.stringify(value);
    return `${key}=${text.length > MAX_VALUE ? `${text.slice(0, MAX_VALUE)}…` : text}`;
  });
  return `${name}(${shown.join(", ")})`;
}
