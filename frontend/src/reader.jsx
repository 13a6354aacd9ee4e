// The studio in a report: everything that can be looked at, nothing that would have to be computed.

import { Answers } from "./answers.jsx";
import { Hasse } from "./hasse.jsx";
import { LayersPanel } from "./mask_panel.jsx";
import { Matrix } from "./matrix.jsx";
import { Readout } from "./page.jsx";

export function Reader({ studio, hasFields }) {
  return (
    <div class="page reader" data-settled={studio.asked.value === 0 && studio.view.value !== null}>
      <main>
        <div class="centre">
          <Matrix studio={studio} />
          {hasFields ? <Readout studio={studio} /> : <p class="quiet">What each position reads after how many layers is not in this page: there are too many positions. The studio shows it.</p>}
        </div>
        <div class="side" aria-label="What follows" role="group">
          <Hasse studio={studio} />
          {studio.view.value?.stacked && <LayersPanel studio={studio} />}
          <Answers studio={studio} />
        </div>
      </main>
    </div>
  );
}
