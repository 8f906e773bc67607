// The views, in the order of the navigation. key: the letter after g. isMain: in the bar at the bottom of a phone.

export const VIEWS = [
  { name: "overview", title: "Overview", key: "o", isMain: true, load: () => import("./overview.js") },
  { name: "versions", title: "Versions", key: "v", isMain: true, needs: "live", load: () => import("./versions.js") },
  { name: "log", title: "Log", key: "l", isMain: true, load: () => import("./log.js") },
  { name: "settings", title: "Settings", key: "e", load: () => import("./settings.js") },
];
