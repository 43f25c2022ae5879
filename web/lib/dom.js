// Small things about elements that several views need.

export function element(tag, className = "", content = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (content) made.textContent = content;
  return made;
}

// Text that has not changed is not written: writing makes the browser lay out and paint.
export function write(target, content) {
  if (target.textContent !== content) target.textContent = content;
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
