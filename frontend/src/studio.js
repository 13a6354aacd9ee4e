// The studio's state: what the server said last, what the reader is looking at. It computes nothing about masks.

import { batch, computed, effect, signal } from "@preact/signals";

const QUESTIONS = ["flow", "diagram", "leaks", "cost", "difference"];
const COARSE_CELLS = 512;
export const FINE = 1024; // positions up to which every pair is drawn

/** The state of a studio in a "page" of its own, a "widget" of a notebook, or a "report", where nothing can be changed. */
export function createStudio(place) {
  const studio = {
    place,
    status: signal("connecting"), // connecting, open, closed
    screen: signal("mask"),
    reason: signal(""),
    view: signal(null),
    catalogue: signal(null),
    tile: signal(null),
    answers: Object.fromEntries([...QUESTIONS, "code"].map((name) => [name, signal({ value: null, error: "" })])),
    field: signal(null),
    message: signal({ kind: "", text: "" }),
    waiting: signal(null), // what is being computed for long
    asked: signal(0), // questions without an answer, and what waits to be asked
    redrawn: signal(null), // milliseconds from an action to its picture
    layer: signal(0),
    cursor: signal(null), // {query, key}
    pinned: signal(false),
    layers: signal(null), // how many layers of the receptive field are lit; null is all
    tool: signal("look"),
    brush: signal(1),
    leak: signal(null), // number of the leak that is drawn
    window: signal(null), // {query, key, span}
    tab: signal("leaks"),
  };
  const pending = new Map();
  let transport = null;
  let number = 0;
  let remembering = () => {};

  studio.size = computed(() => studio.view.value?.size ?? 0);
  studio.maxLayers = computed(() => {
    const flow = studio.answers.flow.value.value;
    return flow ? Math.min(flow.num_layers ?? flow.depth, 256) : 1;
  });
  studio.lit = computed(() => Math.min(studio.layers.value ?? studio.maxLayers.value, studio.maxLayers.value));
  studio.path = computed(() => {
    const leaks = studio.answers.leaks.value.value?.leaks ?? [];
    return studio.leak.value === null ? null : (leaks[studio.leak.value]?.witness ?? null);
  });

  const count = (step) => (studio.asked.value = studio.asked.peek() + step);

  function ask(message) {
    count(1);
    return new Promise((resolve) => {
      const id = ++number;
      const timer = setTimeout(() => (studio.waiting.value = message.op), 400);
      pending.set(id, (reply) => {
        clearTimeout(timer);
        resolve(reply);
        setTimeout(() => count(-1)); // after the reply has been taken, and the next question asked
      });
      transport.send({ id, ...message });
    });
  }

  function windowOf() {
    const { query, key, span } = studio.window.value ?? { query: 0, key: 0, span: studio.size.value };
    return { layer: studio.layer.value, first_query: query, first_key: key, span, cells: cellsOf(span) };
  }

  async function act(op, values = {}) {
    const start = performance.now();
    const size = studio.size.value;
    const sized = values.tile ?? (size ? wholeOf(values, size) : undefined);
    const reply = await ask({ op, ...values, ...(sized ? { tile: sized } : {}) });
    studio.waiting.value = null;
    if (!reply.ok) {
      studio.message.value = { kind: "error", text: reply.error };
      if (reply.restarted) await synchronise();
      return false;
    }
    take(reply);
    requestAnimationFrame(() => (studio.redrawn.value = performance.now() - start));
    await Promise.all([reply.tile && coversWindow(reply) ? null : draw(), inquire()]);
    return true;
  }

  function wholeOf(values, size) {
    const now = studio.window.value;
    const span = now?.span ?? size;
    return { layer: values.layer ?? studio.layer.value, first_query: now?.query ?? 0, first_key: now?.key ?? 0, span, cells: cellsOf(span) };
  }

  // A mask of another size makes the window and the tile that came with it those of another picture.
  const coversWindow = (reply) => reply.size === reply.tile.num_queries || studio.window.value !== null;

  function take(reply) {
    batch(() => {
      const resized = studio.view.value && studio.view.value.size !== reply.size;
      studio.view.value = reply;
      if (studio.layer.value >= reply.layers.length) studio.layer.value = reply.layers.length - 1;
      if (resized) {
        studio.window.value = null;
        studio.cursor.value = null;
        studio.field.value = null;
        studio.pinned.value = false;
      }
      studio.leak.value = null;
      if (reply.tile && !resized) studio.tile.value = reply.tile;
      studio.message.value = reply.notices.length ? { kind: "notice", text: `${reply.notices.join("; ")}.` } : { kind: "", text: "" };
    });
    remembering(reply.design);
  }

  async function draw() {
    const reply = await ask({ op: "tile", ...windowOf(), revision: studio.view.value.revision });
    studio.waiting.value = null;
    if (reply.ok && !reply.stale) studio.tile.value = reply;
  }

  async function inquire() {
    const revision = studio.view.value.revision;
    const wanted = [...QUESTIONS, ...(studio.tab.value === "code" ? ["code"] : [])];
    for (const op of wanted) {
      const reply = await ask({ op, revision, layer: studio.layer.value });
      studio.waiting.value = null;
      if (reply.stale || studio.view.value.revision !== revision) return;
      const old = studio.answers[op].value;
      studio.answers[op].value = reply.ok ? { value: reply, error: "" } : { value: old.value, error: reply.error };
      if (reply.restarted) {
        await synchronise();
        return;
      }
      if (op === "diagram" && studio.cursor.value) follow();
    }
  }

  // The process of this page is a new one: it has the design, and another count of revisions.
  async function synchronise() {
    const reply = await ask({ op: "state" });
    if (reply.ok) take({ ...reply, notices: [studio.message.value.text || "stopped"] });
    await draw();
  }

  // Somebody else has changed the design: another view of it, or a program.
  async function catchUp() {
    const reply = await ask({ op: "state" });
    if (!reply.ok || reply.revision === studio.view.peek()?.revision) return;
    take(reply);
    await Promise.all([draw(), inquire()]);
  }

  let following = false;
  async function follow() {
    if (following) return;
    following = true;
    while (studio.cursor.value && studio.field.value?.position !== studio.cursor.value.query) {
      const position = studio.cursor.value.query;
      const reply = await ask({ op: "field", position, revision: studio.view.value.revision });
      if (!reply.ok || reply.stale) break;
      studio.field.value = reply;
    }
    following = false;
  }

  Object.assign(studio, {
    act,
    ask,
    draw,
    catchUp,
    async showCode() {
      const reply = await ask({ op: "code" });
      if (reply.ok) studio.answers.code.value = { value: reply, error: "" };
    },
    stop: () => transport.send({ op: "stop" }),
    point(cursor) {
      const now = studio.cursor.value;
      if (now?.query === cursor?.query && now?.key === cursor?.key) return;
      studio.cursor.value = cursor;
      if (!cursor) studio.field.value = null;
      else follow();
    },
    zoom(factor, centre) {
      const n = studio.size.value;
      const now = studio.window.value ?? { query: 0, key: 0, span: n };
      const span = Math.max(Math.min(8, n), Math.min(n, Math.round(now.span * factor)));
      const at = centre ?? { query: now.query + now.span / 2, key: now.key + now.span / 2 };
      const place = (first, c) => Math.max(0, Math.min(n - span, Math.round(c - ((c - first) / now.span) * span)));
      studio.window.value = span >= n ? null : { query: place(now.query, at.query), key: place(now.key, at.key), span };
      refresh();
    },
    reveal({ query, key }) {
      const now = studio.window.value;
      if (!now) return;
      const n = studio.size.value;
      const shift = (first, at) => Math.max(0, Math.min(n - now.span, at < first ? at : at >= first + now.span ? at - now.span + 1 : first));
      const next = { query: shift(now.query, query), key: shift(now.key, key), span: now.span };
      if (next.query !== now.query || next.key !== now.key) {
        studio.window.value = next;
        refresh();
      }
    },
    selectLayer(layer) {
      studio.layer.value = layer;
      draw();
      inquire();
    },
    async start(newTransport, { design, remember } = {}) {
      transport = newTransport;
      remembering = remember ?? (() => {});
      studio.status.value = "open";
      const [list, state] = await Promise.all([ask({ op: "catalogue" }), ask({ op: "state" })]);
      studio.catalogue.value = list;
      take(state);
      if (design) await act("restore", { design });
      else await Promise.all([draw(), inquire()]);
    },
    answer(reply) {
      pending.get(reply.id)?.(reply);
      pending.delete(reply.id);
    },
    close(reason) {
      batch(() => {
        studio.status.value = "closed";
        studio.reason.value = reason;
        studio.waiting.value = null;
      });
    },
  });

  let timer = 0;
  function refresh() {
    if (studio.size.value <= FINE && studio.tile.value?.num_queries === studio.size.value) return; // all of it is here
    if (timer) clearTimeout(timer);
    else count(1);
    timer = setTimeout(() => {
      timer = 0;
      draw();
      count(-1);
    }, 40);
  }

  effect(() => {
    if (studio.tab.value === "code" && studio.view.peek()) studio.showCode();
  });
  return studio;
}

const cellsOf = (span) => (span <= FINE ? Math.max(1, span) : COARSE_CELLS);
