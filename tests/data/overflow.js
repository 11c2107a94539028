() => {
    const width = document.documentElement.clientWidth;
    const scrolls = (one) => one && (["auto", "scroll"].includes(getComputedStyle(one).overflowX)
        || scrolls(one.parentElement));
    const wide = [...document.querySelectorAll("body *")].filter(
        (one) => one.getBoundingClientRect().right > width + 1 && !scrolls(one.parentElement));
    return [document.documentElement.scrollWidth - width, wide.map((one) => one.outerHTML.slice(0, 80))];
}
