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

// What the model reads: the user's messages with a response, each with that response, then the last message.
export function promptMessages(branch, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  branch.forEach((message, index) => {
    const next = branch[index + 1];
    if (message.role === "assistant") {
      if (isAnswer(message)) messages.push(asAssistant(message));
    } else if (!next || next.role !== "assistant" || isAnswer(next)) {
      messages.push({ role: "user", content: message.content });
    }
  });
  return messages;
}

const isAnswer = (message) => Boolean(message.content || message.calls?.length);

function asAssistant(message) {
  const entry = { role: "assistant", content: message.content };
  if (message.reasoning) entry.reasoning_content = message.reasoning;
  return entry;
}
