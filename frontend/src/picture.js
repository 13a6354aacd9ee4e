// How a tile becomes pixels and where things lie on the canvas. Colours come from the style sheet.

const MARGIN = { left: 54, top: 38, right: 6, bottom: 6 };
const WIDE = { left: 92, top: 88, right: 6, bottom: 6 };

export function palette(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  const names = ["page", "panel", "ink", "soft", "rule", "given", "flow", "leak", "missing", "extra", "dead"];
  return { ...Object.fromEntries(names.map((name) => [name, colour(`--${name}`)])), font: colour("--mono") };
}

/** Where the matrix lies in a square of `side` pixels, and what one position takes. */
export function geometry(side, size, window, withTokens) {
  const { query, key, span } = window ?? { query: 0, key: 0, span: size };
  const words = withTokens && (side - WIDE.left - WIDE.right) / span >= 10;
  const margin = words ? WIDE : size > 1e5 ? { ...MARGIN, left: 62 } : MARGIN;
  const extent = Math.max(1, side - margin.left - margin.right);
  const height = Math.max(1, side - margin.top - margin.bottom);
  const inner = Math.min(extent, height);
  const cell = inner / span >= 2 ? Math.floor(inner / span) : inner / span;
  return {
    left: margin.left,
    top: margin.top,
    inner: cell * span,
    cell,
    words, // whether tokens are written on the axes, for which there is room
    query,
    key,
    span,
    x: (position) => margin.left + (position - key) * cell,
    y: (position) => margin.top + (position - query) * cell,
    at(px, py) {
      const column = Math.floor((px - margin.left) / cell);
      const row = Math.floor((py - margin.top) / cell);
      if (column < 0 || row < 0 || column >= span || row >= span) return null;
      const place = { query: query + row, key: key + column };
      return place.query < size && place.key < size ? place : null;
    },
  };
}

/** A tile with a byte for each cell in place of its base64 planes: 0 of none, 255 of all of its pairs. */
export function decoded(tile) {
  const { rows, columns, step } = tile;
  const cells = {};
  for (const [name, plane] of Object.entries(tile.planes)) {
    const content = Uint8Array.from(atob(plane), (c) => c.charCodeAt(0));
    cells[name] = step === 1 ? unpacked(content, rows, columns) : content;
  }
  const { planes, ...rest } = tile;
  return { ...rest, cells };
}

function unpacked(bits, rows, columns) {
  const cells = new Uint8Array(rows * columns);
  const width = (columns + 7) >> 3;
  for (let row = 0, i = 0; row < rows; row++)
    for (let column = 0; column < columns; column++, i++) if (bits[row * width + (column >> 3)] & (128 >> (column & 7))) cells[i] = 255;
  return cells;
}

/** Keeps the image of the tile that is shown, one pixel for each of its cells. */
export function painter() {
  let last = { cells: null, colours: null };
  let canvas = null;
  return (tile, colours) => {
    const hues = [colours.given, colours.missing, colours.extra].join();
    const same = last.cells === tile.cells && last.hues === hues;
    if (same) return canvas;
    canvas = new OffscreenCanvas(Math.max(1, tile.columns), Math.max(1, tile.rows));
    last = { cells: tile.cells, hues };
    if (tile.rows && tile.columns) canvas.getContext("2d").putImageData(pixels(tile, colours), 0, 0);
    return canvas;
  };
}

/** An image of a tile that is drawn once. */
export const image = (tile, colours) => painter()(decoded(tile), colours);

function pixels(tile, colours) {
  const { rows, columns } = tile;
  const data = new ImageData(columns, rows);
  const view = new Uint32Array(data.data.buffer);
  for (const [plane, colour] of [["allowed", colours.given], ["missing", colours.missing], ["extra", colours.extra]]) {
    const cells = tile.cells[plane];
    if (!cells) continue;
    const [r, g, b] = rgb(colour);
    const hue = (b << 16) | (g << 8) | r;
    for (let i = 0; i < rows * columns; i++) {
      const share = cells[i];
      if (share) view[i] = ((share === 255 ? 255 : 70 + Math.round(0.6 * share)) << 24) | hue;
    }
  }
  return data;
}

/** Positions to write on an axis: all where there is room, else round ones. */
export function ticks(first, span, cell, room) {
  let step = 1;
  const next = [2, 2.5, 2];
  for (let i = 0; step * cell < room; i++) step *= next[i % 3];
  step = Math.round(step);
  const start = Math.ceil(first / step) * step;
  return Array.from({ length: Math.max(0, Math.ceil((first + span - start) / step)) }, (_, i) => start + i * step);
}

function rgb(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
}
