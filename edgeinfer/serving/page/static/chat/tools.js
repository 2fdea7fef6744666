// The tools of the page's servers: each call is shown to the user, who runs or refuses it.

import { get, send } from "../api.js";
import { callDialog } from "../dialogs.js";

const REFUSED = "error: the user refused this call";

export class Tools {
  constructor() {
    Object.assign(this, { schemas: [], allowed: new Set(), warnings: [] });
  }

  async load() {
    const { tools, allowed, warnings } = await get("/page/tools");
    Object.assign(this, { schemas: tools, allowed: new Set(allowed), warnings });
  }

  // The results of calls, in their order. Throws AbortError once `signal` is aborted.
  async results(calls, signal) {
    const results = [];
    for (const call of calls) results.push({ name: call.name, content: await this.#result(call, signal) });
    return results;
  }

  async #result(call, signal) {
    if (!this.allowed.has(call.name)) {
      const answer = await callDialog(call, signal);
      signal.throwIfAborted();
      if (answer === "no") return REFUSED;
      if (answer === "always") this.allowed.add(call.name);
    }
    try {
      const result = await send("POST", "/page/tools/call", { name: call.name, arguments: call.arguments }, { signal });
      return result.content;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      return `error: ${error.message}`;
    }
  }
}
