// Prometheus histograms: summed over series, as bars with quantiles.
import { element } from "./map.js";

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// [[upper bound in seconds, count in this bucket alone], …], ascending; the last bound is Infinity.
export function bucketsOf(text, family, wanted) {
  const cumulative = new Map();
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line);
    if (!match || match[1] !== `${family}_bucket`) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map((l) => [l[1], l[2]]));
    if (Object.entries(wanted).some(([name, value]) => labels[name] !== value)) continue;
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    cumulative.set(bound, (cumulative.get(bound) ?? 0) + Number(match[3]));
  }
  const bounds = [...cumulative.keys()].sort((a, b) => a - b);
  return bounds.map((bound, i) => [bound, cumulative.get(bound) - (cumulative.get(bounds[i - 1]) ?? 0)]);
}

// Linear within a bucket, as Prometheus' histogram_quantile does.
export function quantile(buckets, share) {
  const total = buckets.reduce((sum, [, count]) => sum + count, 0);
  let seen = 0;
  for (const [i, [bound, count]] of buckets.entries()) {
    const low = i ? buckets[i - 1][0] : 0;
    if (count && seen + count >= share * total) {
      return bound === Infinity ? low : low + (bound - low) * ((share * total - seen) / count);
    }
    seen += count;
  }
  return NaN;
}

export function duration(seconds) {
  if (Number.isNaN(seconds)) return "–";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

function tick(bound) {
  if (bound === Infinity) return "∞";
  return bound < 1 ? `${+(bound * 1000).toPrecision(2)}ms` : `${bound}s`;
}

// The few slowest of few say nothing about one in a hundred.
function quantiles(buckets, total) {
  const shown = total < 100 ? [50, 90] : [50, 99];
  return shown.map((part) => `p${part} ${duration(quantile(buckets, part / 100))}`).join(" · ");
}

export function drawHistogram(place, figures, buckets) {
  const most = Math.max(1, ...buckets.map(([, count]) => count));
  const total = buckets.reduce((sum, [, count]) => sum + count, 0);
  figures.textContent = total
    ? `${quantiles(buckets, total)} · n ${total}`
    : "nothing yet";
  place.replaceChildren(...buckets.map(([bound, count], index) => {
    const bar = element("i");
    bar.style.height = `${(80 * count) / most}%`;
    const label = element("span", "", index % 3 ? "\u00a0" : tick(bound)); // every one does not fit
    const column = element("div", "", bar, label);
    column.title = `up to ${tick(bound)}: ${count}`;
    return column;
  }));
}
