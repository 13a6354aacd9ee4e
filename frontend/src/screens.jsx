// What the studio shows: a mask, a family of tasks, a model. Each screen keeps what it had while another one is shown.

import { Families } from "./families.jsx";
import { Model } from "./model.jsx";

export const SCREENS = [
  ["mask", "Mask"],
  ["families", "Families"],
  ["model", "Model"],
];

export function ScreenTabs({ studio }) {
  return (
    <nav class="screens" aria-label="Screens">
      {SCREENS.map(([name, label]) => (
        <button type="button" key={name} aria-current={studio.screen.value === name ? "page" : undefined} onClick={() => (studio.screen.value = name)}>{label}</button>
      ))}
    </nav>
  );
}

/** The screen that is shown in place of the mask's. */
export function Screen({ studio }) {
  return studio.screen.value === "families" ? <Families studio={studio} /> : <Model studio={studio} />;
}
