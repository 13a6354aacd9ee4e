// How a tile becomes pixels and where things lie on the canvas. Colours come from the style sheet.

const MARGIN = { left: 44, top: 30, right: 6, bottom: 6 };
const WIDE = { left: 82, top: 76, right: 6, bottom: 6 };

export function palette(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  const names = ["page", "panel", "ink", "soft", "rule", "cell", "flow", "leak", "missing", "dead"];
  return { ...Object.fromEntries(names.map((name) => [name, colour(`--${name}`)])), font: colour("--mono") };
}

/** Where the matrix lies in a square of `side` pixels, and what one position takes. */
export function geometry(side, size, window, withTokens) {
  const { query, key, span } = window ?? { query: 0, key: 0, span: size };
  const margin = withTokens && side / span > 9 ? WIDE : MARGIN;
  const extent = Math.max(1, side - margin.left - margin.right);
  const height = Math.max(1, side - margin.top - margin.bottom);
  const inner = Math.min(extent, height);
  const cell = inner / span >= 2 ? Math.floor(inner / span) : inner / span;
  return {
    left: margin.left,
    top: margin.top,
    inner: cell * span,
    cell,
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

/** An image of a tile, one pixel for each of its cells. */
export function image(tile, colours) {
  const { rows, columns, step, planes } = tile;
  const canvas = new OffscreenCanvas(columns, rows);
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  const view = new Uint32Array(pixels.data.buffer);
  const layers = [
    [planes.allowed, rgb(colours.cell)],
    [planes.missing, rgb(colours.missing)],
    [planes.extra, rgb(colours.flow)],
  ];
  for (const [plane, [r, g, b]] of layers) {
    if (!plane) continue;
    const content = Uint8Array.from(atob(plane), (c) => c.charCodeAt(0));
    const solid = (255 << 24) | (b << 16) | (g << 8) | r;
    if (step === 1) {
      const width = (columns + 7) >> 3;
      for (let row = 0; row < rows; row++)
        for (let column = 0; column < columns; column++)
          if (content[row * width + (column >> 3)] & (128 >> (column & 7))) view[row * columns + column] = solid;
    } else {
      for (let i = 0; i < content.length; i++) {
        if (!content[i]) continue;
        const alpha = content[i] === 255 ? 255 : 70 + Math.round(0.6 * content[i]);
        view[i] = (alpha << 24) | (b << 16) | (g << 8) | r;
      }
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
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
