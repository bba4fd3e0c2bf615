// Axes: where a number lies in a picture, and which numbers are written along it.

/**
 * @typedef {object} Scale
 * @property {(value: number) => number} at place of a value in the picture
 * @property {number[]} ticks
 */

/** A linear scale from 0, or a logarithmic one. @returns {Scale} */
function scale(values, from, to, logarithmic) {
  const known = values.filter((value) => Number.isFinite(value) && (!logarithmic || value > 0));
  const most = Math.max(...known);
  if (!logarithmic) {
    const ticks = steps(most || 1);
    const end = Math.max(ticks[ticks.length - 1], most || 1);
    return { at: (value) => from + ((to - from) * value) / end, ticks };
  }
  const least = Math.min(...known);
  const [low, high] = [Math.log10(least) - 0.07, Math.log10(most) + 0.07];
  const width = Math.max(high - low, 1e-9);
  const at = (value) => from + ((to - from) * (Math.log10(value) - low)) / width;
  return { at, ticks: decades(10 ** low, 10 ** high) };
}

/** Round numbers from 0 to just above the most, four to six of them. */
function steps(most) {
  const raw = most / 4;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * size).find((one) => one >= raw);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, place) => place * step);
}

/** Powers of ten in a range, with 2 and 5 between them where that is little; where it is less, even steps, two or more. */
function decades(least, most) {
  const found = [];
  const few = Math.log10(most / least) < 2.2;
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power += 1) {
    for (const one of few ? [1, 2, 5] : [1]) {
      const value = one * 10 ** power;
      if (value >= least && value <= most) found.push(value);
    }
  }
  return found.length > 1 ? found : evenly(least, most);
}

/** Round numbers in a range between two powers of ten. */
function evenly(least, most) {
  const size = 10 ** Math.floor(Math.log10(most - least));
  const step = [1, 0.5, 0.25, 0.2].map((one) => one * size).find((one) => Math.floor(most / one) - Math.ceil(least / one) >= 1);
  const first = Math.ceil(least / step);
  return Array.from({ length: Math.floor(most / step) - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

/** The values that have room to be written along a horizontal axis. */
function legible(values, at, text) {
  let end = -Infinity;
  return values.filter((value) => {
    const half = wide(text(value)) / 2;
    if (at(value) - half < end + 6) return false;
    end = at(value) + half;
    return true;
  });
}

/** A number as a person counts. */
function counted(value) {
  return value.toLocaleString("en-US");
}

/** A number at an axis, short. */
function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(0).replace("e+", "e");
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

/** Places at least a gap apart between two bounds, as near as can be to those that are wanted, in their order. */
function spaced(wanted, gap, low, high) {
  const pools = [];
  wanted.forEach((place, number) => {
    let pool = { mean: place - number * gap, count: 1 };
    while (pools.length && pools[pools.length - 1].mean > pool.mean) {
      const before = pools.pop();
      const count = before.count + pool.count;
      pool = { mean: (before.mean * before.count + pool.mean * pool.count) / count, count };
    }
    pools.push(pool);
  });
  const last = Math.max(low, high - (wanted.length - 1) * gap);
  const flat = pools.flatMap((pool) => Array(pool.count).fill(Math.min(Math.max(pool.mean, low), last)));
  return flat.map((place, number) => place + number * gap);
}

/** The width that a figure has for its picture. */
function room(id) {
  const box = one(id);
  const style = getComputedStyle(box);
  return Math.max(260, Math.floor(box.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
}
