// A family of tasks: its subtasks row by row under the merged task that they become, and the proof node by node.

import { useComputed, useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { CopyButton, Legend } from "./answers.jsx";
import { createFamilies } from "./families.js";
import { grouped, plural } from "./format.js";
import { Hasse } from "./hasse.jsx";
import { Parameter } from "./mask_panel.jsx";
import { MergedMatrix } from "./merged_matrix.jsx";
import { Save } from "./save.jsx";

const KINDS = { data: "a data token", mask: "[MASK], made of no token", mean: "the mean of tokens" };

export function Families({ studio }) {
  studio.families ??= createFamilies(studio);
  const state = studio.families;
  useEffect(() => void state.open(), []);
  const reply = state.reply.value;
  return (
    <main class="families" data-saved>
      <div class="side" role="group" aria-label="Family">
        <FamilyPanel state={state} />
        <Facts state={state} />
        <TakeAway state={state} studio={studio} />
      </div>
      <div class="centre">
        {reply ? <Score state={state} /> : <p class="quiet">{state.error.value || "…"}</p>}
        <div class="pair">
          <MergedMatrix state={state} />
          <WhatIf state={state} />
        </div>
      </div>
      <div class="side" role="group" aria-label="Proof">
        <Proof state={state} />
        <Diagram state={state} />
      </div>
    </main>
  );
}

function FamilyPanel({ state }) {
  const { list, entry } = state;
  const shown = { ...state.reply.value?.settings, ...state.settings.value };
  const words = state.text.value.split(/\s+/).filter(Boolean).length;
  return (
    <section class="panel" aria-labelledby="family-title">
      <h2 id="family-title">Family</h2>
      <label class="field">
        <span>family</span>
        <select value={state.name.value} onChange={(event) => state.choose(event.currentTarget.value)}>
          {(list.value?.families ?? []).map((each) => <option value={each.name}>{each.name.replaceAll("_", " ")}</option>)}
        </select>
      </label>
      <div class="parameters">
        {entry.value?.parameters.map((parameter) => (
          <Parameter key={`${state.name.value}.${parameter.name}`} parameter={parameter} value={shown[parameter.name]} set={state.set} />
        ))}
      </div>
      <p class="relation">{entry.value?.summary ?? "\u00a0"}</p>
      <label class="text">
        <span>Text <span class="aside n">{words} of {list.value?.max_words ?? "–"} words</span></span>
        <textarea rows="3" spellcheck={false} maxLength={list.value?.max_characters} value={state.text.value} onInput={(event) => state.type(event.currentTarget.value)} />
      </label>
      <p class="trouble fixed" role="alert">{state.error.value}</p>
    </section>
  );
}

function Facts({ state }) {
  const facts = state.reply.value?.facts ?? [];
  return (
    <section class="panel" aria-labelledby="merged-title">
      <h2 id="merged-title">Merged <span class="aside">{state.reply.value?.call ?? ""}</span></h2>
      <dl class="lines">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function TakeAway({ state, studio }) {
  const reply = state.reply.value;
  const open = async () => {
    if (await studio.act("restore", { design: reply.design })) studio.screen.value = "mask";
  };
  return (
    <section class="panel" aria-labelledby="take-title">
      <h2 id="take-title">Export</h2>
      <div class="buttons">
        <CopyButton label="Copy code" text={() => reply.code} disabled={!reply} />
        <button type="button" disabled={!reply} onClick={open} title="The merged task as a design: paint on it, read its code">Open as a mask</button>
      </div>
      {reply && <p class="quiet">Merged mask <Save name="merged mask" /> Subtasks <Save name="subtasks" isTable /></p>}
    </section>
  );
}

/** A column for each position id, a row for each lane of the merged task and for each subtask. */
function Score({ state }) {
  const { words, merged, lanes, subtasks } = state.reply.value;
  const lanesOf = Array.from({ length: lanes }, (_, lane) => merged.filter((cell) => cell.lane === lane));
  return (
    <div class="score" tabIndex={0} role="region" aria-label="Subtasks and the merged task">
      <table>
        <caption class="sr">Rows are the merged task and its subtasks; columns are position ids. The current step of the proof is marked.</caption>
        <thead>
          <tr><th scope="col">position</th>{words.map((word, i) => <th scope="col" title={word}><span class="n">{i}</span></th>)}</tr>
        </thead>
        <tbody class="merged">
          {lanesOf.map((cells, lane) => (
            <tr key={lane}>
              {lane === 0 && <th scope="rowgroup" rowSpan={lanes}>merged<small class="n">{merged.length}</small></th>}
              <Row state={state} cells={cells.map((cell) => ({ ...cell, position: merged.indexOf(cell) }))} width={words.length} label={(cell) => mergedLabel(state, cell)} />
            </tr>
          ))}
        </tbody>
        <tbody>
          {subtasks.map((task, number) => (
            <tr key={number}>
              <th scope="row">task {number}<small class="n">{task.cells.length}</small></th>
              <Row state={state} cells={task.cells.map((cell) => ({ ...cell, task: number }))} width={words.length} label={(_, i) => namesOf(words, task.labels.filter(([position]) => position === i))} />
            </tr>
          ))}
        </tbody>
      </table>
      <Legend items={[["now", "the node of this step"], ["read", "what it reads"], ...(state.leak.value ? [["leak", "path of the leak"]] : [])]} />
    </div>
  );
}

function Row({ state, cells, width, label }) {
  const at = [];
  cells.forEach((cell, i) => (at[cell.column] = { ...cell, label: label(cell, i) }));
  return Array.from({ length: width }, (_, column) => <td key={column}>{at[column] && <Cell state={state} cell={at[column]} />}</td>);
}

function Cell({ state, cell }) {
  return (
    <span
      class={`cell ${cell.kind} ${lookOf(state, cell)}`}
      title={`${cell.short}: ${KINDS[cell.kind]}; merged position ${cell.position}, node ${cell.node}`}
      onPointerEnter={() => (state.hover.value = cell.node)}
      onPointerLeave={() => (state.hover.value = null)}
      onClick={() => state.go(cell.node)}
    >
      <span>{cell.short}</span>
      {cell.label && <small>→ {cell.label}</small>}
    </span>
  );
}

/** The way of a leak is one in the merged task; what a node reads is marked there and in the tasks that have the node. */
function lookOf(state, cell) {
  const node = state.node.value;
  if (cell.task === undefined && state.leak.value?.witness.includes(cell.position)) return "leak";
  if (state.here.value === cell.node) return "now";
  const shares = cell.task === undefined || node?.members.some(([task]) => task === cell.task);
  return shares && node?.reads.includes(cell.position) ? "read" : "";
}

const namesOf = (words, labels) => [...new Set(labels.map(([, token]) => words[token]))].join(" ");

function mergedLabel(state, cell) {
  const { nodes, words } = state.reply.value;
  return namesOf(words, nodes[cell.node].labels.filter(([position]) => position === cell.position));
}

/** The diagram of the first screen, with what this one looks at in place of its pointer. */
function Diagram({ state }) {
  const view = {
    answers: { diagram: useComputed(() => ({ value: state.reply.value?.diagram ?? null, error: "" })) },
    cursor: useComputed(() => (state.node.value ? { query: state.node.value.positions[0] } : null)),
    field: useComputed(() => (state.node.value ? { position: state.node.value.positions[0], runs: state.node.value.reads.map((i) => [i, i + 1, 1]) } : null)),
    lit: useSignal(1),
    path: useComputed(() => state.leak.value?.witness ?? null),
    look: (position) => (state.hover.value = state.reply.value.merged[position]?.node ?? null),
    pick: (position) => position >= 0 && state.go(state.reply.value.merged[position].node),
  };
  return <Hasse studio={view} />;
}

function Proof({ state }) {
  const reply = state.reply.value;
  const node = state.node.value;
  const leak = state.leak.value;
  if (!reply || !node) return <section class="panel proof"><h2>Proof</h2></section>;
  const last = reply.nodes.length - 1;
  const { here } = state;
  return (
    <section class="panel proof" aria-labelledby="proof-title">
      <h2 id="proof-title">Proof <span class="aside n">node {here.value} of {grouped(last + 1)}</span></h2>
      <p class={reply.total ? "verdict bad" : "verdict good"} role="status">
        {reply.total ? `${plural(reply.total, "leak")}: a label can be read where it must be predicted` : `No leak: proved for ${plural(reply.labels, "label")}, any number of layers`}
      </p>
      <div class="steps">
        <button type="button" aria-label="Node before" disabled={here.value === 0} onClick={() => state.go(here.value - 1)}>‹</button>
        <input type="range" aria-label="Node of the proof" min="0" max={last} value={here.value} aria-valuetext={`node ${here.value} of ${last + 1}`} onInput={(event) => state.go(Number(event.currentTarget.value))} />
        <button type="button" aria-label="Node after" disabled={here.value === last} onClick={() => state.go(here.value + 1)}>›</button>
      </div>
      <dl class="lines proof-lines">
        <div><dt>holds</dt><dd>{listed(node.positions.map((i) => `${reply.merged[i].short} at ${reply.merged[i].column}`), 3)}</dd></div>
        <div><dt>stands for</dt><dd>{listed(node.members.map(([task, i]) => `task ${task} · ${i}`), 6)}</dd></div>
        <div><dt>reads</dt><dd>{plural(node.reads.length, "merged position")}, made of</dd></div>
      </dl>
      <p class="strip" role="img" aria-label={`Tokens that flow in: ${node.data.length ? node.data.map((i) => reply.words[i]).join(", ") : "none"}`}>
        {reply.words.map((word, i) => {
          const flows = node.data.includes(i);
          const asked = node.labels.some(([, token]) => token === i);
          return <span class={`token ${flows ? "flows" : ""} ${asked ? (flows ? "leak" : "asked") : ""}`}>{word}</span>;
        })}
      </p>
      <p class={leak ? "conclusion trouble" : "conclusion"}>{conclusion(reply, node, leak)}</p>
    </section>
  );
}

function conclusion(reply, node, leak) {
  if (leak) return `Position ${leak.position} must predict token ${leak.token} “${leak.word}”, which flows into it. ${leak.route.replace(/^./, (first) => first.toUpperCase())}.`;
  if (node.labels.length) {
    const asked = [...new Set(node.labels.map(([, token]) => token))].map((token) => `${token} “${reply.words[token]}”`);
    return `Must predict token ${listed(asked, 4)}. ${asked.length > 1 ? "None of them flows in: no label here can leak." : "It does not flow in: the label cannot leak."}`;
  }
  return node.positions.every((i) => reply.dead.includes(i)) ? "Predicts nothing, and no label depends on it: it is dead." : "Predicts nothing; other positions read it.";
}

const listed = (texts, most) => (texts.length > most ? `${texts.slice(0, most).join(", ")} and ${texts.length - most} more` : texts.join(", "));

function WhatIf({ state }) {
  const query = useSignal("0");
  const key = useSignal("1");
  const size = state.reply.value?.merged.length ?? 1;
  const number = (name, value) => (
    <label class="field number">
      <span>{name}</span>
      <input type="number" min="0" max={size - 1} value={value.value} onInput={(event) => (value.value = event.currentTarget.value)} />
    </label>
  );
  const add = (event) => {
    event.preventDefault();
    const pair = [Number(query.value), Number(key.value)];
    if (pair.every((i) => Number.isInteger(i) && i >= 0 && i < size)) state.toggle(...pair);
  };
  return (
    <section class="panel" aria-labelledby="whatif-title">
      <h2 id="whatif-title">What if it could also read …?</h2>
      <form class="whatif" onSubmit={add}>
        {number("position", query)}
        {number("reads", key)}
        <button type="submit" disabled={!state.reply.value}>Let it</button>
      </form>
      <ul class="pairs">
        {state.pairs.value.map(([q, k]) => (
          <li><button type="button" aria-label={`Forbid ${q} to read ${k} again`} onClick={() => state.toggle(q, k)}><span class="n">{q} ← {k}</span> ×</button></li>
        ))}
        {state.pairs.value.length > 1 && <li><button type="button" onClick={state.clear}>Forbid all again</button></li>}
      </ul>
      <p class="quiet">{state.pairs.value.length ? "These pairs are added to the merged mask, and the proof above includes them." : "Or click a pair of the matrix. The proof is repeated, and a leak shows its path."}</p>
    </section>
  );
}
