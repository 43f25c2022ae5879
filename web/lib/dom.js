// Small things about elements that several views need.

export function element(tag, className = "", content = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

// Text that has not changed is not written: writing makes the browser lay out and paint. What has
// goes into the text node that is there: a new one would make the browser match every :has() of the
// frontend's styles again, 4 ms a draw (measured, frontend 1.32.9).
export function write(target, content) {
  const inside = target.firstChild;
  if (inside?.nodeType !== Node.TEXT_NODE || inside.nextSibling) target.textContent = content;
  else if (inside.data !== content) inside.data = content;
}

// Makes `live` equal to `wanted` and touches only what differs. `wanted` may lose its children.
export function patch(live, wanted) {
  for (const { name } of [...live.attributes]) {
    if (!wanted.hasAttribute(name)) live.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (live.getAttribute(name) !== value) live.setAttribute(name, value);
  }
  const old = [...live.childNodes];
  const made = [...wanted.childNodes];
  made.forEach((node, i) => {
    if (!old[i]) live.append(node);
    else if (old[i].nodeName !== node.nodeName) old[i].replaceWith(node);
    else if (node.nodeType !== Node.TEXT_NODE) patch(old[i], node);
    else if (old[i].data !== node.data) old[i].data = node.data;
  });
  for (const node of old.slice(made.length)) node.remove();
}

export function button(label, className, onClick) {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

// A widget's element: a drag that begins on it must not move the node, and the wheel goes to the
// canvas, which would be dead over it otherwise. `scrolls` says when the element wants the wheel.
export function keepPointer(box, app, scrolls = () => false) {
  const vue = () => Boolean(window.LiteGraph?.vueNodesMode);
  for (const type of ["pointerdown", "pointermove", "pointerup"]) {
    box.addEventListener(type, (event) => {
      if (vue()) event.stopPropagation();
    });
  }
  box.addEventListener(
    "wheel",
    (event) => {
      if (scrolls() && !event.ctrlKey && !event.metaKey) event.stopPropagation();
      else if (!vue()) app.canvas?.processMouseWheel?.(event);
    },
    { passive: false },
  );
}

// The clipboard of the browser, or the old way where the page is not served securely.
export async function copy(content) {
  try {
    await navigator.clipboard.writeText(content);
    return true;
  } catch {
    const area = element("textarea", "speed-tier-unseen");
    area.value = content;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}
