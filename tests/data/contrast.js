() => {
    const parse = (rgb) => { const [r, g, b, a = 1] = rgb.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
    const light = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
        .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
        .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
    const ground = (item) => { for (; item; item = item.parentElement) {
        const rgb = parse(getComputedStyle(item).backgroundColor);
        if (rgb[3] === 1) return rgb;
    } return [255, 255, 255]; };
    const low = [...document.querySelectorAll("body *")].filter((item) => item.checkVisibility()
            && [...item.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())).filter((item) => {
        const style = getComputedStyle(item);
        const [dark, bright] = [light(parse(style.color)), light(ground(item))].sort((a, b) => a - b);
        const size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        return (bright + 0.05) / (dark + 0.05) < (isLarge ? 3 : 4.5);
    });
    const silent = [...document.querySelectorAll("a, summary, [tabindex], nav")].filter(
        (item) => !(item.getAttribute("aria-label") || item.textContent).trim());
    return [...low, ...silent].map((item) => item.outerHTML.slice(0, 120));
}
