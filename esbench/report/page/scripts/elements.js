// Elements: every text goes into the page as text, never as markup.

const SVG = document.getElementById("pen").namespaceURI;

/** Fill an element: attributes by name, `on...` as listeners, children as nodes or as text. */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** A new element of HTML. */
function html(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** A new element of SVG. */
function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** An element of the page, by its id. */
function one(id) {
  return document.getElementById(id);
}

/** Replace what an element holds. */
function put(id, ...children) {
  const element = typeof id === "string" ? one(id) : id;
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const PENCIL = document.createElement("canvas").getContext("2d");

/** How wide a text of a picture is, in pixels. */
function wide(text) {
  PENCIL.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return PENCIL.measureText(text).width;
}

/** A text as it fits into so many pixels. */
function fitted(text, pixels) {
  if (wide(text) <= pixels) return text;
  let [least, most] = [1, Array.from(text).length];
  while (least < most) {
    const middle = Math.ceil((least + most) / 2);
    if (wide(cut(text, middle)) <= pixels) least = middle;
    else most = middle - 1;
  }
  return cut(text, least);
}

/** A text that is cut to so many characters, the middle left out: the end of a label tells variants apart. */
function cut(text, most) {
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const front = Math.ceil((most - 1) * 0.6);
  return `${letters.slice(0, front).join("")}…${letters.slice(letters.length - (most - 1 - front)).join("")}`;
}

/** A label that may be broken where its words end. */
function breakable(label) {
  return label.split(/(?<=[a-z])(?=[A-Z])|(?<=\()/).flatMap((part, place) => (place ? [html("wbr"), part] : [part]));
}

/** Fill a figure of the page: its caption, its picture or what stands in its place, its note. */
function show(id, caption, picture, note = "") {
  const figure = one(id);
  figure.hidden = !picture;
  if (!picture) return;
  put(figure.querySelector("figcaption"), caption);
  put(figure.querySelector(".chart"), picture);
  put(figure.querySelector(".note"), note);
}

/** A picture with its description; so wide, so high. */
function picture(width, height, description, ...children) {
  const box = `0 0 ${width} ${height}`;
  return drawn("svg", { viewBox: box, width, height, role: "img", "aria-label": description }, ...children);
}
