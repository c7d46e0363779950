// Histograms as bars with quantiles.
import { element } from "./map.js";

// [[upper bound in seconds, count in this bucket alone], …], ascending; the last bound is Infinity.
// Nothing where nothing has been counted yet.
export function bucketsOf(histogram) {
  if (!histogram) return [];
  return [...histogram.bounds, Infinity].map((bound, i) => [bound, histogram.counts[i]]);
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
