// The state of the screen of the model: what was asked of it, what came, what is at work.

import { batch, signal } from "@preact/signals";

export const VIEWS = ["audit", "geometry", "bias", "trace"];

export function createModel(studio) {
  const state = {
    info: signal(null), // null until the model has been read; {model: null} without one
    error: signal(""),
    text: signal(""),
    tab: signal("audit"),
    busy: signal(null), // what is at work
    results: Object.fromEntries(VIEWS.map((name) => [name, signal({ value: null, error: "", text: null })])),
  };

  // One thing at a time: a second one would wait for the first, and look as if it were at work.
  async function ask(message) {
    if (state.busy.value) return null;
    batch(() => {
      state.busy.value = message.op;
      studio.progress.value = null;
    });
    const reply = await studio.ask(message, true);
    batch(() => {
      state.busy.value = null;
      studio.progress.value = null;
    });
    return reply;
  }

  return Object.assign(state, {
    async open() {
      if (state.info.value) return;
      state.error.value = "";
      const reply = await ask({ op: "model" });
      if (!reply) return;
      if (!reply.ok) return void (state.error.value = reply.error);
      state.info.value = reply;
      state.text.value = reply.text ?? "";
    },
    /** Ask the question of a view; `more` chooses a part of its answer, and keeps what there is until it comes. */
    async run(name, more = {}) {
      const old = state.results[name].value;
      const text = Object.keys(more).length && old.text !== null ? old.text : state.text.value;
      const reply = await ask({ op: name, text, ...more });
      if (!reply) return;
      state.results[name].value = reply.ok ? { value: reply, error: "", text } : { ...old, error: reply.error };
    },
    stop: studio.stopModel,
  });
}
