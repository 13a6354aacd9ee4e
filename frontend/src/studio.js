// The studio's state: what the server said last, what the reader is looking at. It computes nothing about masks.

import { batch, computed, effect, signal } from "@preact/signals";
import { decoded } from "./picture.js";

const QUESTIONS = ["flow", "diagram", "leaks", "blocks"];
const ABOUT_LABELS = ["labels", "label", "source", "tokens"]; // what changes no mask
const RESTS = 250; // milliseconds after which a pointer that rests is told what takes longer
const COARSE_CELLS = 512;
export const FINE = 1024; // positions up to which every pair is drawn

export function createStudio() {
  const studio = {
    status: signal("connecting"), // connecting, open, closed
    screen: signal(null), // the prompt's if there is a model, else the mask's
    modelName: signal(null),
    progress: signal(null), // [done, total, what] of the work on a model
    reason: signal(""),
    guest: signal(false), // whether the address has the token of an earlier run, whose design alone is shown
    view: signal(null),
    catalogue: signal(null),
    tile: signal(null),
    candidate: signal(null), // {name, settings}: a mask chosen in the form that is not used yet
    preview: signal({ value: null, error: "" }), // the candidate beside the layer's mask
    answers: Object.fromEntries([...QUESTIONS, "code"].map((name) => [name, signal({ value: null, error: "" })])),
    field: signal(null),
    message: signal({ kind: "", text: "" }),
    waiting: signal(null), // what is being computed for long
    asked: signal(0), // questions without an answer, and what waits to be asked
    redrawn: signal(null), // milliseconds from an action to its picture
    linked: signal(true), // whether the address holds what is shown
    layer: signal(0),
    cursor: signal(null), // {query, key}
    pinned: signal(false),
    layers: signal(null), // how many layers of the receptive field are lit; null is all
    tool: signal("look"),
    brush: signal(1),
    leak: signal(null), // number of the leak that is drawn
    opened: signal(false), // whether the model has a state
    window: signal(null), // {query, key, span}
    tab: signal("leaks"),
    model: null, // the state of the model's screen
    place: {}, // what the address said of it, until it is opened
  };
  const pending = new Map();
  let transport = null;
  let number = 0;
  let remembering = () => {};
  let linking = 0;

  studio.size = computed(() => studio.view.value?.size ?? 0);
  studio.depth = computed(() => {
    const flow = studio.answers.flow.value.value;
    return flow ? (flow.num_layers ?? flow.depth) : 1;
  });
  studio.maxLayers = computed(() => Math.min(studio.depth.value, studio.answers.flow.value.value?.followed ?? Infinity));
  studio.lit = computed(() => Math.min(studio.layers.value ?? studio.maxLayers.value, studio.maxLayers.value));
  studio.path = computed(() => {
    const leaks = studio.answers.leaks.value.value?.leaks ?? [];
    return studio.leak.value === null ? null : (leaks[studio.leak.value]?.witness ?? null);
  });

  const count = (step) => (studio.asked.value = studio.asked.peek() + step);

  function ask(message, quietly = false) {
    count(1);
    return new Promise((resolve) => {
      const id = ++number;
      const timer = quietly ? 0 : setTimeout(() => (studio.waiting.value = message.op), 400);
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

  /** Change the design; `start` is when the reader's hand asked for it, in milliseconds of this page. */
  async function act(op, values = {}, start = performance.now()) {
    hurry(); // what was typed before comes first
    const isMask = !ABOUT_LABELS.includes(op);
    const candidate = JSON.stringify(studio.candidate.peek());
    const size = studio.size.value;
    const window = size ? windowOf() : undefined;
    const reply = await ask({ op, ...values, ...(window ? { tile: window } : {}) });
    studio.waiting.value = null;
    if (!reply.ok) {
      studio.message.value = { kind: "error", text: reply.error };
      if (reply.restarted) await synchronise();
      return false;
    }
    const drawn = batch(() => {
      if (isMask && JSON.stringify(studio.candidate.peek()) === candidate) consider(null); // else another was chosen meanwhile
      return take(reply, window);
    });
    afterPaint(() => {
      const end = performance.now();
      performance.measure("attnflow redrawn", { start, end });
      studio.redrawn.value = end - start;
    });
    if (!drawn) await draw();
    await inquire();
    return true;
  }

  /** Take what there is now; whether it brought the picture of the window along. */
  function take(reply, window) {
    return batch(() => {
      const resized = studio.view.value && studio.view.value.size !== reply.size;
      studio.view.value = { ...studio.view.value, ...reply, tile: null };
      if (studio.layer.value >= reply.layers.length) studio.layer.value = reply.layers.length - 1;
      if (resized) {
        studio.window.value = null;
        studio.cursor.value = null;
        studio.field.value = null;
        studio.pinned.value = false;
      }
      studio.leak.value = null;
      studio.message.value = reply.notices.length ? { kind: "notice", text: `${reply.notices.join("; ")}.` } : { kind: "", text: "" };
      link(reply.design);
      return Boolean(reply.tile) && !resized && sameWindow(window, windowOf()) && show({ ...reply.tile, revision: reply.revision }, window);
    });
  }

  /** Show a tile of a window. */
  function show(reply, window) {
    studio.tile.value = { ...decoded(reply), window };
    return true;
  }

  // Browsers refuse an address that changes with every stroke: it follows when the hand rests.
  let linkedDesign = null;
  function link(design) {
    clearTimeout(linking);
    linkedDesign = design;
    studio.linked.value = false;
    linking = setTimeout(() => {
      remembering(linkedDesign, here());
      studio.linked.value = true;
    }, 300);
  }

  /** What is looked at, for the address. */
  function here() {
    const { screen, ...place } = studio.place;
    return { screen: studio.screen.value, ...(studio.opened.value ? studio.model.here.value : place) };
  }

  /** Look at a mask of the catalogue beside the layer's, with settings that suit it where none are given; or at none. */
  async function consider(candidate) {
    studio.candidate.value = candidate;
    if (!candidate) return void (studio.preview.value = { value: null, error: "" });
    studio.message.value = { kind: "", text: "" };
    const { revision } = studio.view.peek();
    const reply = await ask({ op: "preview", layer: studio.layer.value, ...candidate, tile: windowOf(), revision });
    studio.waiting.value = null;
    if (studio.candidate.peek() !== candidate) return; // another one has been chosen, or this one used
    if (reply.stale) return consider(candidate);
    studio.preview.value = reply.ok ? { value: { ...reply, tile: decoded(reply.tile) }, error: "" } : { value: null, error: reply.error };
  }

  async function draw() {
    const window = windowOf();
    if (studio.candidate.peek()) consider({ ...studio.candidate.peek() });
    const reply = await ask({ op: "tile", ...window, revision: studio.view.value.revision });
    studio.waiting.value = null;
    if (reply.ok && !reply.stale && sameWindow(window, windowOf())) show(reply, window);
  }

  // Where the last round of answers took long, the next waits for a hand that paints on.
  let round = 0;

  async function inquire() {
    const revision = studio.view.value.revision;
    if (round > 100) {
      count(1);
      await new Promise((resolve) => setTimeout(resolve, Math.min(round, 400)));
      count(-1);
    }
    if (studio.view.value.revision !== revision) return;
    const start = performance.now();
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
      if (op === "flow" && studio.cursor.value) follow();
    }
    round = performance.now() - start;
  }

  // The process of this page is a new one: it has the design, and another count of revisions.
  async function synchronise() {
    const reply = await ask({ op: "state" });
    if (reply.ok) take({ ...reply, notices: [studio.message.value.text || "stopped"] });
    await draw();
  }

  let following = false;
  let resting = 0;
  async function follow(layers = 0) {
    clearTimeout(resting);
    if (following) return;
    following = true;
    const isNew = () => studio.field.value?.position !== studio.cursor.value.query || studio.field.value.of !== studio.view.value.revision;
    const isShort = () => layers > studio.field.value.followed;
    while (studio.cursor.value && (isNew() || isShort())) {
      const position = studio.cursor.value.query;
      const { revision } = studio.view.value;
      const reply = await ask({ op: "field", position, revision, layers });
      if (!reply.ok || reply.stale) break;
      studio.field.value = { ...reply, of: revision };
      layers = 0; // the next position is new
    }
    following = false;
    if (studio.cursor.value && studio.lit.value > studio.field.value?.followed) followLater();
  }
  function followLater() {
    clearTimeout(resting);
    resting = setTimeout(() => follow(studio.lit.value), RESTS);
  }

  Object.assign(studio, {
    act,
    ask,
    count,
    draw,
    consider,
    async showCode() {
      const reply = await ask({ op: "code" });
      if (reply.ok) studio.answers.code.value = { value: reply, error: "" };
    },
    /** Draw the way of a leak, or if it is drawn, no more. */
    async showLeak(number) {
      studio.leak.value = studio.leak.peek() === number ? null : number;
      const { value } = studio.answers.leaks.peek();
      if (studio.leak.value === null || value.leaks[number].witness) return;
      const reply = await ask({ op: "witness", number, revision: studio.view.value.revision });
      if (!reply.ok || reply.stale || studio.answers.leaks.peek().value !== value) return;
      const leaks = value.leaks.map((leak, i) => (i === number ? { ...leak, witness: reply.witness, route: reply.route } : leak));
      studio.answers.leaks.value = { value: { ...value, leaks }, error: "" };
    },
    stop: () => transport.send({ op: "stop" }),
    stopModel: () => transport.send({ op: "stop", what: "model" }),
    point(cursor) {
      const now = studio.cursor.value;
      if (now?.query === cursor?.query && now?.key === cursor?.key) return;
      studio.cursor.value = cursor;
      if (!cursor) studio.field.value = null;
      else follow();
    },
    /** Point at a position from the diagram, unless one is held; a click holds it, or lets it go. */
    look(position) {
      if (!studio.pinned.value) studio.point(position < 0 ? null : { query: position, key: position });
    },
    pick(position) {
      if (position < 0) return;
      const isHeld = studio.pinned.value && studio.cursor.value?.query === position;
      studio.pinned.value = false;
      studio.point({ query: position, key: position });
      studio.pinned.value = !isHeld;
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
      batch(() => {
        consider(null);
        studio.layer.value = layer;
      });
      draw();
      inquire();
    },
    async start(newTransport, { design, place = {}, remember } = {}) {
      transport = newTransport;
      remembering = remember ?? (() => {});
      studio.place = place;
      studio.status.value = "open";
      const about = await ask({ op: "about" }, true);
      batch(() => {
        studio.modelName.value = about.model;
        studio.screen.value ??= ["prompt", "mask", "families"].includes(place.screen) ? place.screen : about.model ? "prompt" : "mask";
      });
      const [list, state] = await Promise.all([ask({ op: "catalogue" }), ask({ op: "state" })]);
      studio.catalogue.value = list;
      take(state);
      if (design && JSON.stringify(design) !== state.design) await act("restore", { design });
      else await Promise.all([draw(), inquire()]);
      if (studio.answers.leaks.peek().value?.total && studio.leak.peek() === null) studio.showLeak(0);
    },
    /** Show a place of an earlier address: Back and Forward. */
    goTo(place) {
      studio.place = place;
      if (place.screen) studio.screen.value = place.screen;
      studio.model?.goTo(place);
    },
    answer(reply) {
      if (reply.guest) return void (studio.guest.value = true);
      if (reply.progress) return void (studio.progress.value = reply.progress);
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

  let later = null;
  /** Call it after `delay` milliseconds, unless something else is to be called then: what was typed meanwhile. */
  function soon(call, delay) {
    if (later) clearTimeout(later.timer);
    else count(1);
    const run = () => {
      later = null;
      call();
      count(-1);
    };
    later = { run, timer: setTimeout(run, delay) };
  }
  function hurry() {
    if (!later) return;
    clearTimeout(later.timer);
    later.run();
  }
  Object.assign(studio, { soon, hurry });

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
    if (studio.lit.value > (studio.field.peek()?.followed ?? Infinity)) followLater();
  });
  effect(() => {
    const place = here();
    if (studio.view.peek() && place.screen) link(linkedDesign);
  });
  effect(() => {
    if (studio.tab.value === "code" && studio.view.peek()) studio.showCode();
  });
  return studio;
}

const sameWindow = (a, b) => ["layer", "first_query", "first_key", "span", "cells"].every((name) => a?.[name] === b[name]);

/** Call it when what has been drawn is on its way to the screen. */
function afterPaint(call) {
  requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = call;
    port2.postMessage(0);
  });
}

const cellsOf = (span) => (span <= FINE ? Math.max(1, span) : COARSE_CELLS);
