// A page that was moved leads on with the row and the anchor of the link that came here.
location.replace(document.querySelector("a").href + location.search + location.hash);
