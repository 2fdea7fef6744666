// Text files as parts of a message, in the form of the terminal chat: @name in the text, the files after it.

const MAX_BYTES = 2 * 1024 * 1024;

// {name, text} of a file. Throws an Error of one line if it isn't a text.
export async function readTextFile(file) {
  const name = file.name.replace(/[\n\r"]/g, "_");
  if (file.size > MAX_BYTES) throw new Error(`${name}: ${file.size} bytes, wanted ${MAX_BYTES} at most`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${name}: no text in UTF-8, which is all that a message can hold`);
  }
  if (text.includes("\0")) throw new Error(`${name}: no text, which is all that a message can hold`);
  return { name, text: text.replace(/\r\n/g, "\n") };
}

export const mentionOf = (name) => (name.includes(" ") ? `@"${name}"` : `@${name}`);

// The message with its files appended, each in a fence that is longer than those in it.
export function withFiles(text, files) {
  const missing = files.map((file) => mentionOf(file.name)).filter((mention) => !text.includes(mention));
  const head = [...missing, text].filter(Boolean).join(" ");
  return [head, ...files.map(quoted)].join("\n\n");
}

function quoted({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map((match) => match[0].length));
  const fence = "`".repeat(longest + 1);
  const suffix = /\.([\w]+)$/.exec(name)?.[1] ?? "";
  return `${name}:\n${fence}${suffix}\n${text.trimEnd()}\n${fence}`;
}
