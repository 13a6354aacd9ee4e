// What the studio shows: a mask, or a family of tasks. Each screen keeps what it had while another one is shown.

export const SCREENS = [
  ["mask", "Mask"],
  ["families", "Families"],
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
