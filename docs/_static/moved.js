// A page that was moved leads on with the row of the link that came here, and to where its anchor is now.
const own = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
const target = new URL((own || document).querySelector("a").href);
target.search = location.search;
if (!own && location.hash) target.hash = location.hash;
location.replace(target);
