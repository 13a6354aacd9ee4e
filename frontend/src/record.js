// A record in a report: the replies of a session that has ended, for a reader whom no server answers.

/** {send(message), state, hasFields} over a record, which is deflated JSON in base64. */
export async function recordTransport(text, { onReply }) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const record = JSON.parse(await new Response(stream).text());
  const arrivals = record.arrivals && bytesOf(record.arrivals);
  const size = record.state.size;
  const answer = ({ op, layer = 0, position }) => {
    if (op === "tile" || op === "cost") return record[op][record.distinct[layer]];
    if (op === "field") return arrivals ? { position, revision: record.state.revision, runs: runsOf(arrivals.subarray(position * size, (position + 1) * size)) } : null;
    return record[op];
  };
  return {
    state: record.state,
    hasFields: Boolean(arrivals),
    send(message) {
      const reply = answer(message);
      queueMicrotask(() => onReply({ id: message.id, ok: Boolean(reply), error: "a report does not hold this", ...reply }));
    },
  };
}

const bytesOf = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));

/** Equal neighbours as [first, last (excluded), layer]; 255 is never. */
function runsOf(row) {
  const runs = [];
  for (let first = 0, i = 1; i <= row.length; i++) {
    if (i < row.length && row[i] === row[first]) continue;
    if (row[first] !== 255) runs.push([first, i, row[first]]);
    first = i;
  }
  return runs;
}
