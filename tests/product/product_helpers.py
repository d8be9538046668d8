"""Small documents made on the spot."""

from __future__ import annotations


def make_pdf(*pages: str) -> bytes:
    """A PDF whose pages show the given lines of Latin text (empty text makes an empty page)."""
    bodies = []
    for page in pages:
        lines = "".join(f"({line}) Tj T*\n" for line in page.splitlines())
        bodies.append(f"BT /F1 11 Tf 60 780 Td 15 TL\n{lines}ET")
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, body in enumerate(bodies):
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * number} 0 R >>"
        )
        objects.append(f"<< /Length {len(body)} >>\nstream\n{body}\nendstream")
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n".encode()
    return data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode() + table + end
