// Why a head attended to a token: the score as a sum over pairs of what was written before, and its leading terms.

import { percent, plural } from "./format.js";
import { Bar, fixed, HeatMap, Tokens } from "./model_charts.jsx";
import { Save } from "./save.jsx";

export function Why({ state, value }) {
  const { layer, head, query, key } = value;
  // While the model is at work a choice is ignored, not disabled: a disabled button would lose the keyboard's focus.
  const choose = (change) => {
    if (state.busy.value !== null) return;
    const asked = { layer, head, query, key, ...change };
    state.fields.layer.value = `${layer}`;
    state.fields.head.value = `${asked.head}`;
    state.choose("why", asked);
  };
  const at = value.keys.indexOf(key);
  const row = value.heads.indexOf(head);
  const names = value.keys.map((position) => value.tokens[position]);
  return (
    <>
      <h3>Query <span class="aside">the token that looks, in layer {layer}</span></h3>
      <Tokens label="Query" tokens={value.tokens} chosen={query} onPick={(position) => choose({ query: position, key: null })} />
      <HeatMap title={`Attention of “${value.tokens[query]}” (${query}) in every head: choose a head and a key`} values={value.weights} x="key" y="head" sides={value.heads.map((number) => `head ${number}`)} columns={names} row={row} column={at} onPick={(r, c) => choose({ head: value.heads[r], key: value.keys[c] })} words={percent} full={1} />
      <h3>Key <span class="aside">the token it looks at, coloured by the attention of head {head}</span></h3>
      <Tokens label="Key" tokens={names} values={value.weights[row]} chosen={at} onPick={(i) => choose({ key: value.keys[i] })} words={percent} full={1} />
      <p class="verdict" role="status">{value.verdict}</p>
      {value.remark && <p class="quiet">{value.remark}</p>}
      <Terms value={value} />
      <HeatMap title="Every pair of components, centred" values={value.table} x="written at the key" y="written at the query" sides={value.sides} columns={value.columns} />
      <p class="quiet">{value.check}</p>
    </>
  );
}

function Terms({ value }) {
  const limit = Math.max(...value.terms.map((term) => Math.abs(term.centred)), ...value.constants.map((each) => Math.abs(each.centred)));
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Leading terms" data-saved><Save name="terms" isTable />
      <table class="numbers terms">
        <thead><tr><th scope="col">written at the query</th><th scope="col">written at the key</th><th scope="col" class="n">centred</th><td /><th scope="col" class="n">raw</th></tr></thead>
        <tbody>
          {value.terms.map((term, i) => <Term key={i} names={[term.query, term.key]} term={term} limit={limit} />)}
          {value.rest.count > 0 && <Term names={[`${plural(value.rest.count, "other pair")}`]} term={value.rest} limit={0} />}
          {value.constants.map((each) => <Term key={each.name} names={[each.name]} term={each} limit={limit} />)}
        </tbody>
        <tfoot><Term names={["Sum: the score, centred and raw"]} term={value.sum} limit={0} /></tfoot>
      </table>
    </div>
  );
}

function Term({ names, term, limit }) {
  return (
    <tr>
      <th scope="row" colSpan={names.length > 1 ? 1 : 2}>{names[0]}</th>
      {names.length > 1 && <td>{names[1]}</td>}
      <td class="n">{fixed(term.centred, 3)}</td>
      <td>{limit > 0 && <Bar value={term.centred} limit={limit} />}</td>
      <td class="n">{fixed(term.raw, 3)}</td>
    </tr>
  );
}
