// Numbers as people read them; tabular, with thin spaces between thousands.

const whole = new Intl.NumberFormat("en", { useGrouping: true, maximumFractionDigits: 0 });

export const grouped = (value) => whole.format(value).replaceAll(",", "\u202f");
export const percent = (share) => `${share > 0 && share < 0.001 ? "< 0.1" : (100 * share).toFixed(1)} %`;
export const plural = (count, noun, several = `${noun}s`) => `${grouped(count)} ${count === 1 ? noun : several}`;
