// Makes each picture a link to its file, because its words are too small to read on a telephone.
for (const picture of document.querySelectorAll("article img")) {
  if (picture.closest("a")) continue;
  const link = document.createElement("a");
  link.href = picture.src;
  picture.replaceWith(link);
  link.append(picture);
}
