// How numbers are written: with as many digits as their interval supports, and three where there is none.

const ABSENT = "n/a";

/** Decimals of a number whose interval has this half width: to its first digit, two to four significant ones.
 * Below 0 where not even the last digit before the point is known. */
function decimalsOf(value, low, high) {
  if (!value) return 2;
  const size = Math.floor(Math.log10(Math.abs(value)));
  let digits = 3;
  if (low !== null && high !== null && high > low) {
    digits = Math.min(Math.max(size - Math.floor(Math.log10((high - low) / 2)) + 1, 2), 4);
  }
  return digits - 1 - size;
}

/** A number as text. */
function written(value, low = null, high = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(2);
  if (Number.isInteger(value) && low === null) return value.toLocaleString("en-US");
  return grouped(value, decimalsOf(value, low, high));
}

/** A number with so many decimals, thousands grouped; below 0 decimals are zeros before the point. */
function grouped(value, decimals) {
  const places = Math.min(Math.max(decimals, 0), 12);
  const unit = 10 ** Math.max(-decimals, 0);
  const options = { minimumFractionDigits: places, maximumFractionDigits: places };
  return (Math.round(value / unit) * unit === 0 || decimals >= 0 ? value : Math.round(value / unit) * unit)
    .toLocaleString("en-US", options);
}

/** The 95 % interval of a figure as text, empty where it has none. */
function between(value, low, high) {
  if (low === null || low === high) return "";
  if (high === null) return `at least ${written(low)}`;
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size >= 1e9 || (size && size < 1e-4)) return `${written(low)} to ${written(high)}`;
  const places = decimalsOf(value || low, low, high);
  const ends = [low, high].map((end) => grouped(end, places));
  return ends[0] === ends[1] ? `${written(low)} to ${written(high)}` : ends.join(" to ");
}

/** A ratio as text. */
function times(value, low = null, high = null) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  const size = Math.abs(value);
  const plain = size >= 1e-4 && size < 1e9;
  return `${plain ? grouped(value, decimalsOf(value, low, high)) : written(value)}x`;
}

/** A figure as text, with what is known of it where it is no plain number. */
function figureText(figure) {
  if (figure.k === "exact") return "exact";
  if (figure.m === null) return ABSENT;
  const number = written(figure.m, figure.l, figure.h);
  return figure.k ? `${figure.k} ${number}` : number;
}

/** The name of a unit behind a number. */
function unitText(unit) {
  return unit ? ` ${unit}` : "";
}
