// The views, in the order of the navigation. key: the letter after g. isMain: in the bar at the bottom of a phone.

export const VIEWS = [
  { name: "overview", title: "Overview", key: "o", isMain: true, load: () => import("./overview.js") },
  { name: "curves", title: "Curves", key: "c", isMain: true, load: () => import("./curves.js") },
  { name: "samples", title: "Samples", key: "s", isMain: true, load: () => import("./samples.js") },
  { name: "versions", title: "Versions", key: "v", isMain: true, needs: "live", load: () => import("./versions.js") },
  { name: "chat", title: "Chat", key: "h", needs: "live", load: () => import("./chat.js") },
  { name: "traffic", title: "Traffic", key: "t", needs: "live", load: () => import("./traffic.js") },
  { name: "device", title: "Device", key: "d", needs: "live", load: () => import("./device.js") },
  { name: "runs", title: "Runs", key: "r", load: () => import("./runs.js") },
  { name: "log", title: "Log", key: "l", isMain: true, load: () => import("./log.js") },
  { name: "settings", title: "Settings", key: "e", load: () => import("./settings.js") },
];
