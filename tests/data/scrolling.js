() => [...document.querySelectorAll(".table")].filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => [innerWidth, getComputedStyle(one).backgroundImage.split("linear-gradient").length - 1,
        [...one.querySelectorAll("th, td")].every((cell) =>
            getComputedStyle(cell).backgroundColor === "rgba(0, 0, 0, 0)")])
