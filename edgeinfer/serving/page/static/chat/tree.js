// The messages of a chat as a tree: messages with the same parent are alternatives.

export class Tree {
  constructor(messages = []) {
    this.byId = new Map();
    messages.forEach((message) => this.add(message));
  }

  add(message) {
    this.byId.set(message.id, message);
    return message;
  }

  // The messages from the first one to `tip`.
  branch(tip) {
    const line = [];
    for (let at = this.byId.get(tip); at; at = this.byId.get(at.parent)) {
      line.push(at);
      if (at.parent !== null && at.parent >= at.id) break; // a damaged store
    }
    return line.reverse();
  }

  alternatives(message) {
    return [...this.byId.values()].filter((other) => other.parent === message.parent);
  }

  // The newest leaf below a message.
  newestEnd(message) {
    for (;;) {
      const children = [...this.byId.values()].filter((other) => other.parent === message.id);
      if (children.length === 0) return message;
      message = children[children.length - 1];
    }
  }
}

// What the model reads: the user's messages and the results of tools that have a response, each with it, then the
// last message. A response that only calls tools counts if it has their results.
export function promptMessages(branch, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  branch.forEach((message, index) => {
    const next = branch[index + 1];
    if (message.role === "assistant") {
      if (isAnswer(message, next)) messages.push(asAssistant(message, next));
    } else if (message.role === "tool") {
      if (isAnswer(branch[index - 1], message)) messages.push(...asResults(message));
    } else if (!next || next.role !== "assistant" || isAnswer(next, branch[index + 2])) {
      messages.push({ role: "user", content: message.content });
    }
  });
  return messages;
}

const hasResults = (message, next) => next?.role === "tool" && message?.calls?.length > 0;
const isAnswer = (message, next) => Boolean(message?.content) || hasResults(message, next);
const callId = (index) => `call_${index}`;

function asAssistant(message, next) {
  const entry = { role: "assistant", content: message.content };
  if (message.reasoning) entry.reasoning_content = message.reasoning;
  if (!hasResults(message, next)) return entry;
  const calls = message.calls.map((call, index) => {
    const values = { name: call.name, arguments: JSON.stringify(call.arguments) };
    return { id: callId(index), type: "function", function: values };
  });
  return { ...entry, tool_calls: calls };
}

const asResults = ({ results }) =>
  results.map(({ name, content }, index) => ({ role: "tool", tool_call_id: callId(index), name, content }));
