// The field in which a message is written, with its attached files, and the Send and Stop buttons.

import { button, byId, el, showAlert } from "./dom.js";
import { mentionOf, readTextFile, withFiles } from "./files.js";

export class Composer {
  // `send(text)`: false if it can't be sent now. `stop()` and `cancelEdit()`: the buttons.
  constructor({ send, stop, cancelEdit }) {
    this.field = byId("message");
    this.files = [];
    this.onSend = send;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    this.field.addEventListener("input", () => this.#fit());
    byId("stop").addEventListener("click", stop);
    byId("cancel-edit").addEventListener("click", cancelEdit);
    byId("attach").addEventListener("click", () => byId("picker").click());
    byId("picker").addEventListener("change", (event) => {
      this.attach([...event.target.files]);
      event.target.value = "";
    });
    this.#acceptDrops();
  }

  async submit() {
    const text = this.field.value.trim();
    if (!text && this.files.length === 0) return;
    const files = this.files;
    if (await this.onSend(withFiles(text, files))) this.set("");
  }

  set(text) {
    this.field.value = text;
    this.files = [];
    this.#showFiles();
    this.#fit();
  }

  focus() {
    this.field.focus();
  }

  showRunning(isRunning) {
    const hadFocus = document.activeElement === byId(isRunning ? "send" : "stop");
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    if (hadFocus) byId(isRunning ? "stop" : "send").focus();
  }

  showEditing(isEditing) {
    byId("editing").hidden = !isEditing;
  }

  // Attaches text files; their names are mentioned in the message.
  async attach(files) {
    for (const file of files) {
      try {
        const read = await readTextFile(file);
        this.files = [...this.files.filter((one) => one.name !== read.name), read];
        this.#mention(mentionOf(read.name));
      } catch (error) {
        showAlert(error.message);
      }
    }
    this.#showFiles();
    this.focus();
  }

  #mention(mention) {
    if (this.field.value.includes(mention)) return;
    const before = this.field.value;
    this.field.value = `${before}${before && !/\s$/.test(before) ? " " : ""}${mention} `;
    this.#fit();
  }

  #showFiles() {
    const rows = this.files.map((file) => {
      const remove = () => {
        this.files = this.files.filter((one) => one !== file);
        this.field.value = this.field.value.replace(`${mentionOf(file.name)} `, "").replace(mentionOf(file.name), "");
        this.#showFiles();
        this.focus();
      };
      const size = `${file.text.length.toLocaleString("en")} characters`;
      return el("li", {}, `${file.name}, ${size} `, button("✕", remove, { class: "icon", "aria-label": `Remove ${file.name}` }));
    });
    byId("files").replaceChildren(...rows);
  }

  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${Math.min(this.field.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  #acceptDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    let depth = 0;
    const show = (isShown) => byId("drop").classList.toggle("shown", isShown);
    addEventListener("dragenter", (event) => {
      if (hasFiles(event)) show(++depth > 0);
    });
    addEventListener("dragleave", (event) => {
      if (hasFiles(event)) show(--depth > 0);
    });
    addEventListener("dragover", (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      show((depth = 0) > 0);
      this.attach([...event.dataTransfer.files]);
    });
  }
}
