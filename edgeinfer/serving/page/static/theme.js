// Sets the theme before the first paint: the system's, unless the user chose one.
"use strict";
{
  const theme = localStorage.getItem("edgeinfer-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
