// Everything on the matrix canvas: cells, axes, the field of a position, a leak's way, what is being painted.

import { ticks } from "./picture.js";

export function drawMatrix(context, scene) {
  const { at, colours, side, picture, tile, size, tokens } = scene;
  context.clearRect(0, 0, side, side);
  context.fillStyle = colours.panel;
  context.fillRect(at.left, at.top, at.inner, at.inner);
  context.save();
  context.beginPath();
  context.rect(at.left, at.top, at.inner, at.inner);
  context.clip();
  if (tile && picture) {
    context.imageSmoothingEnabled = false;
    const unit = tile.step * at.cell;
    context.drawImage(picture, at.x(tile.first_key), at.y(tile.first_query), tile.columns * unit, tile.rows * unit);
  }
  if (at.cell >= 5) grid(context, scene);
  if (at.cell >= 5 && tile?.step === 1) hatch(context, scene);
  fieldOf(context, scene);
  wayOf(context, scene);
  if (scene.drag) rectangle(context, scene, scene.drag);
  pointer(context, scene);
  context.restore();
  context.strokeStyle = colours.rule;
  context.strokeRect(at.left - 0.5, at.top - 0.5, at.inner + 1, at.inner + 1);
  axes(context, scene, size, tokens);
}

function grid(context, { at, colours }) {
  context.strokeStyle = colours.page;
  context.lineWidth = 1;
  context.beginPath();
  for (let i = 0; i <= at.span; i++) {
    const offset = Math.round(i * at.cell) + 0.5;
    context.moveTo(at.left + offset - 1, at.top);
    context.lineTo(at.left + offset - 1, at.top + at.inner);
    context.moveTo(at.left, at.top + offset - 1);
    context.lineTo(at.left + at.inner, at.top + offset - 1);
  }
  context.stroke();
}

/** Strokes across what only one of two masks allows, which print without colour keeps apart: they lean as in the legend. */
function hatch(context, { at, colours, tile }) {
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.beginPath();
  for (const [plane, down] of [["missing", true], ["extra", false]])
    tile.cells?.[plane]?.forEach((share, i) => {
      if (!share) return;
      const [x, y] = [at.x(tile.first_key + (i % tile.columns)), at.y(tile.first_query + Math.floor(i / tile.columns))];
      const half = at.cell / 2;
      for (const side of [0, half]) { // not through the middle, where a path may have a dot
        context.moveTo(x + side, down ? y + half - side : y + half + side);
        context.lineTo(x + side + half, down ? y + at.cell - side : y + side);
      }
    });
  context.stroke();
}

/** The row of a position: what it has read after so many layers, nearer layers stronger. */
function fieldOf(context, { at, colours, field, lit }) {
  if (!field) return;
  const y = at.y(field.position);
  const height = Math.max(3, at.cell);
  const top = y + at.cell / 2 - height / 2;
  for (const [first, last, layer] of field.runs) {
    if (layer > lit) continue;
    context.globalAlpha = layer === 0 ? 1 : Math.max(0.34, 0.92 - 0.14 * (layer - 1));
    context.fillStyle = colours.flow;
    context.fillRect(at.x(first), top, Math.max(1, (last - first) * at.cell), height);
  }
  context.globalAlpha = 1;
}

/** A leak's way: across from where the information is to who reads it, and on from there. */
function wayOf(context, { at, colours, path }) {
  if (!path) return;
  const middle = at.cell / 2;
  context.strokeStyle = colours.leak;
  context.fillStyle = colours.leak;
  context.lineWidth = 2;
  for (let i = 0; i + 1 < path.length; i++) {
    const [source, reader] = [path[i], path[i + 1]];
    const [x, y] = [at.x(source) + middle, at.y(reader) + middle];
    context.beginPath();
    context.moveTo(x, at.y(source) + middle);
    context.lineTo(x, y);
    context.lineTo(at.x(reader) + middle, y);
    context.stroke();
    context.beginPath();
    context.arc(x, y, Math.max(3.5, Math.min(8, at.cell * 0.28)), 0, 7);
    context.fill();
  }
  const [start] = path;
  context.strokeRect(at.x(start) + 1, at.y(start) + 1, Math.max(4, at.cell - 2), Math.max(4, at.cell - 2));
}

function rectangle(context, { at, colours, tool }, { query, key, lastQuery, lastKey }) {
  context.fillStyle = tool === "allow" ? colours.extra : colours.page;
  context.globalAlpha = 0.55;
  const [width, height] = [(lastKey - key) * at.cell, (lastQuery - query) * at.cell];
  context.fillRect(at.x(key), at.y(query), width, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.strokeRect(at.x(key) + 0.5, at.y(query) + 0.5, width - 1, height - 1);
}

function pointer(context, { at, colours, cursor, focused }) {
  if (!cursor) return;
  const [x, y, size] = [at.x(cursor.key), at.y(cursor.query), Math.max(at.cell, 3)];
  context.strokeStyle = colours.soft;
  context.lineWidth = 1;
  context.globalAlpha = 0.6;
  context.beginPath();
  context.moveTo(x + at.cell / 2, at.top);
  context.lineTo(x + at.cell / 2, y);
  context.moveTo(at.left, y + at.cell / 2);
  context.lineTo(x, y + at.cell / 2);
  context.stroke();
  context.globalAlpha = 1;
  context.strokeStyle = colours.ink;
  context.lineWidth = focused ? 2 : 1;
  context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
}

function axes(context, scene, size, tokens) {
  const { at, colours, cursor, labelled, leaking, dead } = scene;
  const { words } = at;
  context.font = `11px ${colours.font}`;
  context.textBaseline = "middle";
  names(context, at, colours);
  const room = words ? 13 : 15;
  for (const position of ticks(at.query, Math.min(at.span, size - at.query), at.cell, room)) {
    const y = at.y(position) + at.cell / 2;
    context.fillStyle = leaking.has(position) ? colours.leak : dead.has(position) ? colours.dead : cursor?.query === position ? colours.ink : colours.soft;
    context.textAlign = "right";
    const text = words ? shorten(tokens[position] ?? "", 9) : String(position);
    context.fillText(text, at.left - 10, y);
    if (dead.has(position)) strike(context, at.left - 10, y, context.measureText(text || "0").width);
  }
  if (at.cell >= 2) marks(context, scene, labelled, leaking);
  context.textAlign = "left";
  const across = ticks(at.key, Math.min(at.span, size - at.key), at.cell, words ? 13 : 8 + 7 * String(size).length);
  for (const position of across) {
    const x = at.x(position) + at.cell / 2;
    context.fillStyle = cursor?.key === position ? colours.ink : colours.soft;
    context.save();
    context.translate(x, at.top - 7);
    if (words) {
      context.rotate(-Math.PI / 2);
      context.fillText(shorten(tokens[position] ?? "", 9), 0, 0);
    } else {
      context.textAlign = "center";
      context.fillText(String(position), 0, -4);
    }
    context.restore();
  }
}

/** Which way is which, where both axes begin. */
function names(context, at, colours) {
  context.fillStyle = colours.soft;
  context.font = `600 11px ${colours.font}`;
  context.textAlign = "left";
  context.fillText("key →", at.left, 7);
  context.save();
  context.translate(7, at.top);
  context.rotate(-Math.PI / 2);
  context.textAlign = "right";
  context.fillText("← query", 0, 0);
  context.restore();
  context.font = `11px ${colours.font}`;
}

/** A dot beside each labelled row. */
function marks(context, { at, colours, size }, labelled, leaking) {
  const radius = Math.max(1, Math.min(2.5, at.cell / 3));
  for (let position = at.query; position < Math.min(size, at.query + at.span); position++) {
    if (!labelled.has(position)) continue;
    context.fillStyle = leaking.has(position) ? colours.leak : colours.soft;
    context.beginPath();
    context.arc(at.left - 4.5, at.y(position) + at.cell / 2, radius, 0, 7);
    context.fill();
  }
}

function strike(context, x, y, width) {
  context.fillRect(x - width - 1, y, width + 2, 1);
}

const shorten = (text, limit) => (text.length > limit ? `${text.slice(0, limit - 1)}…` : text);
