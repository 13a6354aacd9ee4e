// Numbers as people read them; tabular, with thin spaces between thousands.

const whole = new Intl.NumberFormat("en", { useGrouping: true, maximumFractionDigits: 0 });

export const grouped = (value) => whole.format(value).replaceAll(",", "\u202f");
export const percent = (share) => `${share > 0 && share < 0.001 ? "< 0.1" : (100 * share).toFixed(1)} %`;
export const plural = (count, noun, several = `${noun}s`) => `${grouped(count)} ${count === 1 ? noun : several}`;

const STEPS = ["", "k", "M", "G", "T", "P"];

export function short(value) {
  let step = 0;
  let rest = value;
  while (rest >= 1000 && step < STEPS.length - 1) [rest, step] = [rest / 1000, step + 1];
  return `${step && rest < 100 ? rest.toFixed(1) : rest.toFixed(0)}${STEPS[step] ? ` ${STEPS[step]}` : ""}`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  let rest = value;
  while (rest >= 1024 && step < units.length - 1) [rest, step] = [rest / 1024, step + 1];
  return `${step && rest < 100 ? rest.toFixed(1) : rest.toFixed(0)} ${units[step]}`;
}
