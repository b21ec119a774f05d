//! A picture as a list of shapes, which becomes an SVG text or a PNG.
//!
//! Shapes have inks rather than colours: a page gives the inks other colours in dark mode, a file of its own has those for white
//! paper. Lengths are pixels, with the origin above and to the left. A PNG has two pixels for one of them, and the text of every
//! picture is set in the font that the program carries, so that a machine without fonts draws the same.

use std::fmt::Write;

use tiny_skia::{Color, FillRule, Paint, Path, PathBuilder, Pixmap, Shader, Stroke, StrokeDash, Transform};
use ttf_parser::{Face, GlyphId, OutlineBuilder};

/// How many kinds of series there are before inks, dashes and markers begin anew.
pub const SERIES: usize = 8;
/// Pixels of a PNG for one of the picture.
const SCALE: f32 = 2.0;
/// Fonts of pictures and pages: that of the program where there is one, else what is about as wide.
pub const FAMILY: &str = "'Noto Sans','Segoe UI',Helvetica,Arial,'DejaVu Sans',sans-serif";
/// The share of its size below which a picture on a page is not made smaller: then its reader scrolls.
const LEAST_SHARE: f64 = 0.7;
/// Steps of [`Ink::Scale`].
pub const STEPS: usize = 9;

/// What something is painted with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Behind everything.
    Paper,
    /// Text, axes.
    Text,
    /// Text of less weight.
    Faint,
    /// Lines to read values by.
    Grid,
    /// The series of this number, which may be any.
    Series(usize),
    /// Colours from one end to the other of something that has a middle, which is pale; below [`STEPS`].
    Scale(usize),
}

/// Colours for white paper and for dark screens: those of Okabe and Ito, darker or lighter where they would be hard to see. Paper can be
/// read on each series, text on the five middle ones of the scale and paper on the others: contrasts are 4.5 at least.
const COLOURS: [(&str, u32, u32); 4 + SERIES + STEPS] = [
    ("paper", 0xffffff, 0x16191d),
    ("text", 0x1b1f23, 0xe8eaed),
    ("faint", 0x57606a, 0xa9b1ba),
    ("grid", 0xdfe3e8, 0x343a42),
    ("s0", 0x0072b2, 0x4fb0f0),
    ("s1", 0xc04f00, 0xff8f3f),
    ("s2", 0x007f5c, 0x35cfa0),
    ("s3", 0xa94a82, 0xe79ccb),
    ("s4", 0x946500, 0xf2c14e),
    ("s5", 0x5b7a00, 0xb5d95a),
    ("s6", 0x6b6b6b, 0xbdbdbd),
    ("s7", 0x6a4fb3, 0xb9a4f5),
    ("h0", 0x983900, 0xffa05a),
    ("h1", 0xaa6034, 0xc48150),
    ("h2", 0xc69b82, 0x775844),
    ("h3", 0xdac5b8, 0x51443d),
    ("h4", 0xececec, 0x2b3037),
    ("h5", 0xb8cad8, 0x37495a),
    ("h6", 0x82a6c2, 0x42627d),
    ("h7", 0x3472a3, 0x5a95c3),
    ("h8", 0x00508f, 0x6cbcfa),
];

impl Ink {
    fn place(self) -> usize {
        match self {
            Ink::Paper => 0,
            Ink::Text => 1,
            Ink::Faint => 2,
            Ink::Grid => 3,
            Ink::Series(number) => 4 + number % SERIES,
            Ink::Scale(step) => 4 + SERIES + step.min(STEPS - 1),
        }
    }

    /// The class that gives this property its colour, by the style sheet of the document.
    fn style(self, property: &str) -> String {
        format!(r#"class="{}-{}""#, &property[..1], COLOURS[self.place()].0)
    }

    fn colour(self, dark: bool) -> u32 {
        let (_, on_white, on_black) = COLOURS[self.place()];
        if dark { on_black } else { on_white }
    }
}

/// Rules that give inks their colours: as they are on white, or as variables of [`variables`].
fn rules(colour: impl Fn(&str, u32) -> String) -> String {
    COLOURS.iter().fold(String::new(), |mut rules, (name, on_white, _)| {
        let colour = colour(name, *on_white);
        let _ = write!(rules, ".f-{name}{{fill:{colour}}}.s-{name}{{stroke:{colour}}}");
        rules
    })
}

/// The style sheet of a page with pictures: dark where the reader wants it and it is not printed.
pub fn page_colours() -> String {
    let variables = |dark: bool| {
        COLOURS.iter().fold(String::new(), |mut all, (name, on_white, on_black)| {
            let _ = write!(all, "--{name}:#{:06x};", if dark { on_black } else { on_white });
            all
        })
    };
    format!(
        ":root{{{}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{}}}}}\n{}\n",
        variables(false),
        variables(true),
        rules(|name, _| format!("var(--{name})"))
    )
}

/// Which point of a text is at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// A text in one line.
#[derive(Debug, Clone)]
pub struct Text {
    /// Where its anchor is.
    pub x: f64,
    /// Where its base line is.
    pub y: f64,
    /// What it says.
    pub text: String,
    /// Height of a letter with all its ends, in pixels.
    pub size: f64,
    /// What of it is at the place.
    pub anchor: Anchor,
    /// Upwards, around its place.
    pub upright: bool,
    /// Heavier.
    pub bold: bool,
    /// Its colour.
    pub ink: Ink,
}

/// One part of a picture.
#[derive(Debug, Clone)]
enum Shape {
    /// A line through points; with `fill`, the area that it encloses.
    Line {
        points: Vec<(f64, f64)>,
        ink: Ink,
        width: f64,
        dashes: &'static [f32],
    },
    Area {
        points: Vec<(f64, f64)>,
        ink: Ink,
    },
    Text(Text),
}

/// A picture. Later shapes lie over earlier ones.
#[derive(Debug, Clone)]
pub struct Scene {
    width: f64,
    height: f64,
    /// With what is said of it where a pointer rests on it.
    shapes: Vec<(Shape, Option<String>)>,
    parts: Vec<Part>,
}

/// What a page places by itself, as its width allows.
#[derive(Debug, Clone)]
struct Part {
    kind: PartKind,
    /// What it shows.
    name: String,
    /// Its first shape; its others follow until the next part.
    first: usize,
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

/// What a part of a picture is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartKind {
    /// An entry of the legend.
    Legend,
    /// A panel.
    Panel,
}

impl Scene {
    /// An empty picture.
    pub fn new(width: f64) -> Scene {
        Scene { width, height: 0.0, shapes: Vec::new(), parts: Vec::new() }
    }

    /// The height is known only when everything is drawn.
    pub fn set_height(&mut self, height: f64) {
        self.height = height;
    }

    /// Begins a part, which ends where the next one begins. Shapes before the first one are in none.
    pub fn begin_part(&mut self, kind: PartKind, name: &str, (left, top): (f64, f64), (width, height): (f64, f64)) {
        self.parts.push(Part { kind, name: name.to_string(), first: self.shapes.len(), left, top, width, height });
    }

    /// That the last part reaches down to here.
    pub fn end_part(&mut self, bottom: f64) {
        if let Some(part) = self.parts.last_mut() {
            part.height = bottom - part.top;
        }
    }

    /// A line through points. Without dashes it is whole.
    pub fn line(&mut self, points: &[(f64, f64)], ink: Ink, width: f64, dashes: &'static [f32]) {
        self.shapes.push((Shape::Line { points: points.to_vec(), ink, width, dashes }, None));
    }

    /// The area between points.
    pub fn area(&mut self, points: &[(f64, f64)], ink: Ink) {
        self.shapes.push((Shape::Area { points: points.to_vec(), ink }, None));
    }

    /// A rectangle between two corners.
    pub fn rectangle(&mut self, (x0, y0): (f64, f64), (x1, y1): (f64, f64), ink: Ink) {
        self.area(&[(x0, y0), (x1, y0), (x1, y1), (x0, y1)], ink);
    }

    /// A text.
    pub fn text(&mut self, text: Text) {
        self.shapes.push((Shape::Text(text), None));
    }

    /// What is said of the last shape where a pointer rests on it.
    pub fn hint(&mut self, hint: String) {
        if let Some((_, place)) = self.shapes.last_mut() {
            *place = Some(hint);
        }
    }

    /// A sign for a point of a series: another shape for each of its numbers.
    pub fn marker(&mut self, (x, y): (f64, f64), series: usize) {
        let ink = Ink::Series(series);
        let star = |corners: usize, radius: f64, inner: f64, turn: f64| -> Vec<(f64, f64)> {
            let point = |corner: usize| {
                let angle = std::f64::consts::PI * (corner as f64 / corners as f64 + turn);
                let distance = if corner.is_multiple_of(2) { radius } else { inner };
                (x + distance * angle.sin(), y - distance * angle.cos())
            };
            (0..2 * corners).map(point).collect()
        };
        let points = match series % SERIES {
            0 => star(12, 4.5, 4.5, 0.0),
            1 => vec![(x - 4.0, y - 4.0), (x + 4.0, y - 4.0), (x + 4.0, y + 4.0), (x - 4.0, y + 4.0)],
            2 => star(3, 6.2, 3.1, 0.0),
            3 => star(4, 6.2, 3.1, 0.0),
            4 => star(3, 6.2, 3.1, 1.0),
            5 => star(5, 6.8, 2.8, 0.0),
            6 => star(4, 6.6, 1.7, 0.0),
            _ => star(4, 6.6, 1.7, 0.25),
        };
        self.area(&points, ink);
    }

    /// A sign for a figure from elsewhere.
    pub fn reference(&mut self, (x, y): (f64, f64)) {
        for (radius, ink) in [(7.0, Ink::Text), (4.6, Ink::Paper)] {
            self.area(&[(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)], ink);
        }
    }

    /// As an SVG document for white paper.
    pub fn svg(&self, title: &str, description: &str, name: &str) -> String {
        let (width, height) = (number(self.width), number(self.height));
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-labelledby="{name}-title {name}-description" font-family="{FAMILY}"><title id="{name}-title">{}</title><desc id="{name}-description">{}</desc>"#,
            escape(title),
            escape(description)
        );
        let _ = write!(svg, "<style>{}</style>", rules(|_, on_white| format!("#{on_white:06x}")));
        let _ = write!(svg, r#"<rect width="{width}" height="{height}" {}/>"#, Ink::Paper.style("fill"));
        write_shapes(&mut svg, &self.shapes);
        svg + "\n</svg>\n"
    }

    /// Its parts of a kind, each as an SVG element that has the page's colours.
    pub fn parts(&self, kind: PartKind) -> String {
        let mut all = String::new();
        for (index, part) in self.parts.iter().enumerate().filter(|(_, part)| part.kind == kind) {
            let end = self.parts.get(index + 1).map_or(self.shapes.len(), |next| next.first);
            let [left, top, width, height] = [part.left, part.top, part.width, part.height].map(number);
            let least = if kind == PartKind::Panel { (part.width * LEAST_SHARE).round() } else { 0.0 };
            let _ = write!(
                all,
                r#"<svg viewBox="{left} {top} {width} {height}" width="{width}" height="{height}" style="min-width:{least}px" role="img" aria-label="{}" font-family="{FAMILY}">"#,
                escape(&part.name)
            );
            write_shapes(&mut all, &self.shapes[part.first..end]);
            all.push_str("\n</svg>\n");
        }
        all
    }

    /// Each text with its size and what it covers: left, top, right, bottom.
    #[cfg(test)]
    pub fn text_boxes(&self) -> Vec<(String, f64, [f64; 4])> {
        let of = |(shape, _): &(Shape, Option<String>)| {
            let Shape::Text(text) = shape else { return None };
            let width = text_width(&text.text, text.size, text.bold) / other_font(text.bold);
            let before = match text.anchor {
                Anchor::Start => 0.0,
                Anchor::Middle => width / 2.0,
                Anchor::End => width,
            };
            let (above, below) = (0.75 * text.size, 0.2 * text.size);
            let covered = match text.upright {
                false => [text.x - before, text.y - above, text.x - before + width, text.y + below],
                true => [text.x - above, text.y - width + before, text.x + below, text.y + before],
            };
            Some((text.text.clone(), text.size, covered))
        };
        self.shapes.iter().filter_map(of).collect()
    }

    /// As the bytes of a PNG file, for white paper or as it is in the dark.
    pub fn png(&self, dark: bool) -> Result<Vec<u8>, String> {
        let pixels = |length: f64| (length * f64::from(SCALE)).ceil() as u32;
        let mut map = Pixmap::new(pixels(self.width), pixels(self.height)).ok_or("a picture has no size")?;
        map.fill(colour(Ink::Paper, dark));
        let scale = Transform::from_scale(SCALE, SCALE);
        for (shape, _) in &self.shapes {
            match shape {
                Shape::Line { points, ink, width, dashes } => {
                    let dash = if dashes.is_empty() { None } else { StrokeDash::new(dashes.to_vec(), 0.0) };
                    let stroke = Stroke { width: *width as f32, dash, ..Stroke::default() };
                    if let Some(path) = outline(points, false) {
                        map.stroke_path(&path, &paint(*ink, dark), &stroke, scale, None);
                    }
                }
                Shape::Area { points, ink } => {
                    if let Some(path) = outline(points, true) {
                        map.fill_path(&path, &paint(*ink, dark), FillRule::Winding, scale, None);
                    }
                }
                Shape::Text(text) => {
                    if let Some((path, turn)) = letters(text) {
                        map.fill_path(&path, &paint(text.ink, dark), FillRule::Winding, turn.post_concat(scale), None);
                    }
                }
            }
        }
        map.encode_png().map_err(|error| error.to_string())
    }
}

fn write_shapes(svg: &mut String, shapes: &[(Shape, Option<String>)]) {
    for (shape, hint) in shapes {
        let hint = hint.as_deref().map(|hint| format!("<title>{}</title>", escape(hint))).unwrap_or_default();
        svg.push('\n');
        let _ = match shape {
            Shape::Line { points, ink, width, dashes } => {
                let dashes: Vec<String> = dashes.iter().map(f32::to_string).collect();
                let dashes = if dashes.is_empty() { String::new() } else { format!(r#" stroke-dasharray="{}""#, dashes.join(" ")) };
                let style = ink.style("stroke");
                let points = path(points);
                write!(svg, r#"<path d="{points}" fill="none" {style} stroke-width="{}"{dashes}>{hint}</path>"#, number(*width))
            }
            Shape::Area { points, ink } => {
                write!(svg, r#"<path d="{}Z" {}>{hint}</path>"#, path(points), ink.style("fill"))
            }
            Shape::Text(text) => {
                let anchor = match text.anchor {
                    Anchor::Start => "",
                    Anchor::Middle => r#" text-anchor="middle""#,
                    Anchor::End => r#" text-anchor="end""#,
                };
                let (x, y) = (number(text.x), number(text.y));
                let turn = if text.upright { format!(r#" transform="rotate(-90 {x} {y})""#) } else { String::new() };
                let weight = if text.bold { r#" font-weight="bold""# } else { "" };
                let style = text.ink.style("fill");
                let size = number(text.size);
                let words = escape(&text.text);
                write!(svg, r#"<text x="{x}" y="{y}" font-size="{size}"{anchor}{weight}{turn} {style}>{words}{hint}</text>"#)
            }
        };
    }
}

/// Dashes of the series of this number, as different as its marker.
pub fn dashes(series: usize) -> &'static [f32] {
    const DASHES: [&[f32]; SERIES] = [
        &[],
        &[7.0, 3.0],
        &[2.0, 2.5],
        &[9.0, 3.0, 2.0, 3.0],
        &[4.0, 4.0],
        &[12.0, 3.0],
        &[1.5, 4.0],
        &[6.0, 2.0, 1.5, 2.0, 1.5, 2.0],
    ];
    DASHES[series % SERIES]
}

/// Pixels that a text takes at most, whichever font shows it.
pub fn text_width(text: &str, size: f64, bold: bool) -> f64 {
    let face = face(bold);
    let units: u32 = text.chars().map(|letter| advance(&face, glyph(&face, letter))).sum();
    f64::from(units) * size / f64::from(face.units_per_em()) * other_font(bold)
}

/// Viewers that have not the font take another, which may be wider by as much: DejaVu Sans is the widest.
fn other_font(bold: bool) -> f64 {
    if bold { 1.22 } else { 1.12 }
}

fn colour(ink: Ink, dark: bool) -> Color {
    let [_, red, green, blue] = ink.colour(dark).to_be_bytes();
    Color::from_rgba8(red, green, blue, 255)
}

fn paint(ink: Ink, dark: bool) -> Paint<'static> {
    Paint { shader: Shader::SolidColor(colour(ink, dark)), anti_alias: true, ..Paint::default() }
}

fn outline(points: &[(f64, f64)], closed: bool) -> Option<Path> {
    let mut builder = PathBuilder::new();
    for (index, (x, y)) in points.iter().enumerate() {
        match index {
            0 => builder.move_to(*x as f32, *y as f32),
            _ => builder.line_to(*x as f32, *y as f32),
        }
    }
    if closed {
        builder.close();
    }
    builder.finish()
}

fn face(bold: bool) -> Face<'static> {
    let bytes = if bold { notosans::BOLD_TTF } else { notosans::REGULAR_TTF };
    Face::parse(bytes, 0).expect("the font that the program carries is whole")
}

/// Letters that the font lacks become its empty box.
fn glyph(face: &Face<'_>, letter: char) -> GlyphId {
    face.glyph_index(letter).unwrap_or(GlyphId(0))
}

fn advance(face: &Face<'_>, glyph: GlyphId) -> u32 {
    u32::from(face.glyph_hor_advance(glyph).unwrap_or(0))
}

/// Outlines of the letters of a text, and how to turn them.
fn letters(text: &Text) -> Option<(Path, Transform)> {
    let face = face(text.bold);
    let scale = text.size as f32 / f32::from(face.units_per_em());
    let glyphs: Vec<GlyphId> = text.text.chars().map(|letter| glyph(&face, letter)).collect();
    let width = glyphs.iter().map(|glyph| advance(&face, *glyph)).sum::<u32>() as f32 * scale;
    let start = match text.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -width / 2.0,
        Anchor::End => -width,
    };
    let mut pen = Pen { path: PathBuilder::new(), x: text.x as f32 + start, y: text.y as f32, scale };
    for glyph in glyphs {
        face.outline_glyph(glyph, &mut pen);
        pen.x += advance(&face, glyph) as f32 * scale;
    }
    let turn = if text.upright { Transform::from_rotate_at(-90.0, text.x as f32, text.y as f32) } else { Transform::identity() };
    Some((pen.path.finish()?, turn))
}

/// Draws outlines in units of the font, whose axis of y points upwards.
struct Pen {
    path: PathBuilder,
    x: f32,
    y: f32,
    scale: f32,
}

impl Pen {
    fn at(&self, x: f32, y: f32) -> (f32, f32) {
        (self.x + x * self.scale, self.y - y * self.scale)
    }
}

impl OutlineBuilder for Pen {
    fn move_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.move_to(x, y);
    }

    fn line_to(&mut self, x: f32, y: f32) {
        let (x, y) = self.at(x, y);
        self.path.line_to(x, y);
    }

    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        let ((x1, y1), (x, y)) = (self.at(x1, y1), self.at(x, y));
        self.path.quad_to(x1, y1, x, y);
    }

    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        let ((x1, y1), (x2, y2), (x, y)) = (self.at(x1, y1), self.at(x2, y2), self.at(x, y));
        self.path.cubic_to(x1, y1, x2, y2, x, y);
    }

    fn close(&mut self) {
        self.path.close();
    }
}

fn path(points: &[(f64, f64)]) -> String {
    points.iter().enumerate().fold(String::new(), |mut path, (index, (x, y))| {
        let _ = write!(path, "{}{} {}", if index == 0 { 'M' } else { 'L' }, number(*x), number(*y));
        path
    })
}

/// With one digit after the point at most, for shorter files.
fn number(value: f64) -> String {
    ((value * 10.0).round() / 10.0).to_string()
}

/// A text between tags or in an attribute.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the guidelines on contents of the web define it.
    fn contrast(one: u32, other: u32) -> f64 {
        let light = |colour: u32| {
            let part = |shift: u32| {
                let part = f64::from(colour >> shift & 0xff) / 255.0;
                if part <= 0.03928 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * part(16) + 0.7152 * part(8) + 0.0722 * part(0)
        };
        let (one, other) = (light(one) + 0.05, light(other) + 0.05);
        one.max(other) / one.min(other)
    }

    #[test]
    fn inks_can_be_read_on_white_and_in_the_dark() {
        let scale = (0..STEPS).map(|step| (Ink::Scale(step), if (2..STEPS - 2).contains(&step) { Ink::Text } else { Ink::Paper }));
        let series = (0..SERIES).map(|series| (Ink::Series(series), Ink::Paper));
        for (ink, on) in scale.chain(series).chain([(Ink::Text, Ink::Paper), (Ink::Faint, Ink::Paper)]) {
            for dark in [false, true] {
                assert!(contrast(ink.colour(dark), on.colour(dark)) >= 4.5, "{ink:?} on {on:?}, dark: {dark}");
            }
        }
    }
}
