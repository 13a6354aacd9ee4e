// What the studio shows: a prompt of a model, a mask, a family of tasks. Each screen keeps what it had while another one is shown.

import { Families } from "./families.jsx";
import { Prompt } from "./prompt.jsx";

const SCREENS = [
  ["prompt", "Prompt"],
  ["mask", "Mask"],
  ["families", "Families"],
];

export function ScreenTabs({ studio }) {
  const [prompt, ...masks] = SCREENS;
  const screens = studio.modelName.value ? SCREENS : [...masks, prompt]; // a model that was given comes first
  return (
    <nav class="screens" aria-label="Screens">
      {screens.map(([name, label]) => (
        <button type="button" key={name} aria-current={studio.screen.value === name ? "page" : undefined} onClick={() => (studio.screen.value = name)}>{label}</button>
      ))}
    </nav>
  );
}

/** The screen that is shown in place of the mask's. */
export function Screen({ studio }) {
  return studio.screen.value === "families" ? <Families studio={studio} /> : <Prompt studio={studio} />;
}
