// Pictures of a run, a step and a group in Temporal's Web UI, as docs/web-ui.md shows them.
//
//   npm install playwright-core
//   node scripts/screenshots.mjs http://127.0.0.1:8233 RUN STEP docs/images
//
// Needs a Chromium; CHROMIUM names it (default /usr/bin/chromium).
import { chromium } from 'playwright-core';

const [base, run, step, out] = process.argv.slice(2);
const id = encodeURIComponent(`run/${run}`);
const stepId = encodeURIComponent(`run/${run}/step/${step.padStart(6, '0')}`);
const groupId = encodeURIComponent(`run/${run}/step/${step.padStart(6, '0')}/group/00`);

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
const page = await browser.newPage({ viewport: { width: 1500, height: 1250 } });

for (const [name, path] of [
  ['run', `/namespaces/default/workflows/${id}`],
  ['run-details', `/namespaces/default/workflows/${id}`],
  ['step', `/namespaces/default/workflows/${stepId}`],
  ['group', `/namespaces/default/workflows/${groupId}`],
]) {
  await page.goto(base + path, { waitUntil: 'domcontentloaded' });
  await page.waitForTimeout(6000);
  if (name === 'run-details') {
    await page.getByText('User Metadata').first().click();
    await page.waitForTimeout(3000);
  }
  await page.screenshot({ path: `${out}/${name}.png` });
}
await browser.close();
