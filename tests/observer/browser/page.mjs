// Looks at the page as somebody would, and says in JSON what it saw.
// node page.mjs CHROMIUM URL [FOLDER for screenshots]

import { chromium } from "playwright-core";

const [executablePath, url, folder] = process.argv.slice(2);
const PHONE = {
  viewport: { width: 360, height: 740 },
  deviceScaleFactor: 2,
  isMobile: true,
  hasTouch: true,
  colorScheme: "dark",
};
const DESKTOP = { viewport: { width: 1280, height: 860 }, colorScheme: "light" };

const PATIENCE_MS = 120000;

function watchShifts() {
  window.shift = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) window.shift += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
}

async function open(browser, options) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(PATIENCE_MS);
  context.setDefaultNavigationTimeout(PATIENCE_MS);
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) problems.push(message.text());
  });
  page.on("pageerror", (error) => problems.push(error.message));
  const elsewhere = [];
  page.on("request", (request) => {
    if (!request.url().startsWith(url)) elsewhere.push(request.url());
  });
  await page.addInitScript(watchShifts);
  await page.goto(url);
  await page.waitForSelector("body[data-ready]");
  return { context, page, problems, elsewhere };
}

const opened = (page) => page.evaluate(() => document.getElementById("trace").open);

async function look({ page, problems, elsewhere }) {
  // Three more answers.
  await page.waitForTimeout(7000);
  return {
    problems: [...problems],
    elsewhere: [...elsewhere],
    headline: await page.textContent("#headline"),
    level: await page.getAttribute("body", "data-level"),
    figures: await page.locator(".figure .value").allTextContents(),
    shares: await page.locator("#shares tr").count(),
    bars: await page.locator("#chart path").count(),
    slow: await page.locator("#slow button").count(),
    members: await page.locator(".member").count(),
    text: await page.textContent("main"),
    foreign: await page.locator("main img, main script, dialog img, dialog script").count(),
    pwned: await page.evaluate(() => window.pwned ?? null),
    shift: await page.evaluate(() => window.shift),
    overflow: await page.evaluate(() => document.documentElement.scrollWidth - innerWidth),
    nameless: await page.evaluate(
      () =>
        [...document.querySelectorAll("button, a")].filter((each) => !each.textContent.trim())
          .length,
    ),
  };
}

async function trace(page) {
  const first = page.locator("#slow button").first();
  await first.click();
  await page.waitForSelector("#trace .hop");
  await page.locator("#trace details summary").first().click();
  const seen = {
    title: await page.textContent("#trace-title"),
    text: await page.textContent("#trace-body"),
    hops: await page.locator("#trace .hop").count(),
    attributes: await page.locator("#trace details[open] tr").count(),
    overflow: await page.evaluate(() => {
      const dialog = document.getElementById("trace");
      return dialog.scrollWidth - dialog.clientWidth;
    }),
    hash: new URL(page.url()).hash,
  };
  if (folder) await page.screenshot({ path: `${folder}/trace-${page.viewportSize().width}.png` });
  await page.keyboard.press("Escape");
  seen.closed = !(await opened(page));
  seen.focusIsBack = await first.evaluate((button) => button === document.activeElement);
  await page.goto(`${url}#`);
  await page.goto(`${url}${seen.hash}`);
  await page.reload();
  await page.waitForSelector("#trace .hop");
  seen.opensByAddress = await opened(page);
  await page.keyboard.press("Escape");
  return seen;
}

async function keys(page) {
  await page.waitForSelector("body[data-ready]");
  await page.focus("#chart");
  await page.keyboard.press("End");
  const last = await page.getAttribute("#chart", "aria-valuetext");
  await page.keyboard.press("ArrowLeft");
  const before = await page.getAttribute("#chart", "aria-valuetext");
  const column = await page.textContent("#shares-now");
  await page.keyboard.press("Escape");
  return { last, before, column, after: await page.textContent("#shares-now") };
}

async function loss({ context, page }) {
  const shown = () => page.isVisible("#lost");
  const before = await shown();
  await context.setOffline(true);
  await page.waitForSelector("#lost:not([hidden])");
  const text = await page.textContent("#lost");
  await context.setOffline(false);
  await page.waitForSelector("#lost", { state: "hidden" });
  return { before, text, after: await shown() };
}

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
try {
  const phone = await open(browser, PHONE);
  const saw = { phone: await look(phone) };
  if (folder) await phone.page.screenshot({ path: `${folder}/phone-dark.png` });
  saw.trace = await trace(phone.page);
  saw.keys = await keys(phone.page);
  const desktop = await open(browser, DESKTOP);
  saw.desktop = await look(desktop);
  if (folder) await desktop.page.screenshot({ path: `${folder}/desktop-light.png` });
  saw.lost = await loss(desktop);
  process.stdout.write(JSON.stringify(saw));
} finally {
  await browser.close();
}
