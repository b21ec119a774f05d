use super::*;
use crate::report::{Better, Key};

/// A file with measurements in every table, as a machine might give them.
fn made_up() -> Report {
    let mut report = Report::begin("te bench sweep".to_string());
    (report.complete, report.seconds) = (true, 512.0);
    let mut noise = 1u64;
    let mut add = |key: Key, unit: &str, better: Better, value: f64| {
        for _ in 0..7 {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let factor = 0.92 + (noise >> 40) as f64 / (1u64 << 24) as f64 * 0.2;
            report.add(key.clone(), unit, better, value * factor);
        }
    };
    let preload = [256u64, 1024, 4096, 8192, 16384, 65536];
    for regions in preload {
        let n = regions as f64;
        for (quantity, scale) in [
            ("look-up hit", 1.0),
            ("look-up miss", 0.9),
            ("churn", 6.0),
            ("look-up, 2 readers and 1 writer", 2.0),
            ("churn, 2 readers and 1 writer", 9.0),
        ] {
            for (subject, value) in [
                ("ours", 22.0 + n.log2()),
                ("linear scan", 0.16 * n),
                ("ordered map", 28.0 + 4.0 * n.log2()),
                ("descriptor copy", 0.2 * n + 0.4 * n * (scale - 1.0)),
            ] {
                add(Key::new(Table::Index, quantity, subject, &[("regions", regions.into())]), "ns", Better::Less, value * scale);
            }
        }
        for device in ["none", "io_uring", "rxe0"] {
            for update in [false, true] {
                for quantity in ["register", "unregister"] {
                    let pin = if device == "none" { 900.0 } else { 9_000.0 };
                    let subjects =
                        [("ours", pin + if update { 4_000.0 } else { 0.0 }), ("wheel", pin + 90.0 * n), ("verbs", pin * 0.95)];
                    for (subject, value) in subjects.into_iter().filter(|(subject, _)| *subject != "verbs" || device == "rxe0") {
                        let place = [
                            ("device", device.into()),
                            ("update_metadata", update.into()),
                            ("regions", regions.into()),
                            ("measured", 64u64.into()),
                            ("size", 4096u64.into()),
                            ("stride", 8192u64.into()),
                        ];
                        add(Key::new(Table::Register, quantity, subject, &place), "ns", Better::Less, value);
                    }
                }
                let mut pinning = vec![("book-keeping", 420.0), ("residency", 650.0), ("population", 90.0)];
                let name = format!("pinning {device}");
                if device != "none" {
                    pinning.push((&name, 7_800.0));
                }
                if update {
                    pinning.push(("publishing", 3_700.0));
                }
                for (step, value) in pinning {
                    let place = [
                        ("device", device.into()),
                        ("update_metadata", update.into()),
                        ("regions", regions.into()),
                        ("measured", 64u64.into()),
                        ("size", 4096u64.into()),
                        ("stride", 8192u64.into()),
                        ("step", step.into()),
                    ];
                    add(Key::new(Table::Steps, "register", "ours", &place), "ns", Better::Less, value);
                }
            }
        }
    }
    for (memory, page, sequential, threads, ours) in [
        ("written", "4 KiB", 900.0, 480.0, 470.0),
        ("untouched", "4 KiB", 2_400.0, 3_900.0, 1_700.0),
        ("written", "2 MiB", 60.0, 32.0, 31.0),
    ] {
        for (quantity, share) in [("register", 1.0), ("unregister", 0.3), ("allocate, register, unregister", 1.8)] {
            for (subject, value) in [("sequential", sequential), ("thread per device", threads), ("ours", ours)] {
                let place =
                    [("memory", memory.into()), ("page", page.into()), ("devices", 4u64.into()), ("size", (1u64 << 30).into())];
                add(Key::new(Table::Parallel, quantity, subject, &place), "ms", Better::Less, value * share);
            }
        }
    }
    for (size, keys) in [(4u64, 256u64), (16, 64), (16, 256), (64, 16), (64, 64), (256, 4), (256, 16), (1024, 1), (1024, 4)] {
        let total = (size * keys) as f64;
        for device in ["io_uring", "fake verbs"] {
            let gain = if device == "io_uring" { 1.3 + size as f64 / 1000.0 } else { 0.8 + 3.0 / (size as f64).sqrt() };
            for (subject, value) in [("register each time", 0.25 * total * gain), ("pool", 0.25 * total)] {
                let place =
                    [("size", (size << 20).into()), ("keys", keys.into()), ("devices", 1u64.into()), ("device", device.into())];
                add(Key::new(Table::Pool, "put", subject, &place), "ms", Better::Less, value);
            }
        }
    }
    for size in [4096u64, 65_536, 1 << 20, 16 << 20] {
        for operation in ["read", "write"] {
            for (subject, overhead) in [("ours", 21.0), ("plain sockets", 18.0), ("wheel", 55.0)] {
                let place =
                    [("operation", operation.into()), ("size", size.into()), ("threads", 1u64.into()), ("batch", 1u64.into())];
                let latency = overhead + size as f64 / 3_000.0;
                add(Key::new(Table::Transfer, "latency", subject, &place), "us", Better::Less, latency);
                add(Key::new(Table::Transfer, "throughput", subject, &place), "MB/s", Better::More, size as f64 / latency);
            }
        }
    }
    add(Key::new(Table::Machine, "fixed work", "machine", &[]), "ms", Better::Less, 1.3);
    report
}

fn input(report: Report) -> Input {
    Input { label: String::new(), report }
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("te-plot-{name}-{}", std::process::id()))
}

#[test]
fn every_table_is_drawn_as_page_svg_and_png() {
    let directory = std::env::var_os("TE_PLOT_TEST_OUT").map_or_else(|| temporary("all"), PathBuf::from);
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("measurements.json");
    made_up().write(&file).unwrap();
    let written = draw(&[file], &directory).unwrap();
    let names = Vec::from_iter(written.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_string()));
    let stems = [
        "finding-and-keeping-regions",
        "registering-and-unregistering-device-none",
        "registering-and-unregistering-device-io-uring",
        "registering-and-unregistering-device-rxe0",
        "registration-steps",
        "parallel-registration-4-devices",
        "pool",
        "transfers-latency",
        "transfers-throughput",
    ];
    let expected = stems.iter().flat_map(|stem| [format!("{stem}.svg"), format!("{stem}.png")]);
    assert_eq!(names, Vec::from_iter(std::iter::once("report.html".to_string()).chain(expected)));
    for path in &written {
        assert!(fs::metadata(path).unwrap().len() > 2_000, "{} is as good as empty", path.display());
    }
    if std::env::var_os("TE_PLOT_TEST_OUT").is_none() {
        fs::remove_dir_all(&directory).unwrap();
    } else {
        for figure in figures(&[input(made_up())]).0 {
            fs::write(directory.join(format!("{}-dark.png", figure.name)), figure.scene.png(true).unwrap()).unwrap();
        }
    }
}

#[test]
fn charts_without_measurements_are_left_out_and_the_page_says_so() {
    let mut report = made_up();
    report.measurements.retain(|measurement| measurement.key.table == Table::Pool);
    let inputs = [input(report)];
    let (figures, missing) = figures(&inputs);
    assert_eq!(Vec::from_iter(figures.iter().map(|figure| figure.name.as_str())), ["pool"]);
    assert_eq!(missing.len(), 5);
    assert!(page(&inputs, &figures, &missing).contains("Left out, for there are no measurements: finding and keeping regions"));
}

#[test]
fn a_page_needs_nothing_from_elsewhere_and_is_dark_where_that_is_wanted() {
    let inputs = [input(made_up())];
    let (figures, missing) = figures(&inputs);
    let page = page(&inputs, &figures, &missing);
    let own = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for foreign in ["http:", "https:", "<script", "<link", "@import", "url("] {
        assert!(!own.contains(foreign), "{foreign}");
    }
    assert!(page.contains("@media screen and (prefers-color-scheme:dark)") && page.contains(".f-s0{fill:var(--s0)}"));
    for figure in &figures {
        assert!(page.contains(&format!("<section id=\"{}\">", figure.name)), "{}", figure.name);
        assert!(figure.rows.iter().all(|row| row.len() == figure.columns.len()), "{}", figure.name);
        assert!(!figure.scene.svg("", "", "alone").contains("var("), "{}", figure.name);
    }
}

#[test]
fn what_is_said_by_a_file_cannot_become_markup() {
    let mut report = made_up();
    report.command = "<script>alert(1)</script>".to_string();
    report.measurements[0].key.subject = "<b>&\"".to_string();
    let inputs = [input(report)];
    let (figures, missing) = figures(&inputs);
    let page = page(&inputs, &figures, &missing);
    assert!(!page.contains("<script") && !page.contains("<b>") && page.contains("&lt;b&gt;&amp;&quot;"));
}

#[test]
fn files_stand_side_by_side_in_panels_of_their_own() {
    let inputs = ["a.json", "b.json"].map(|label| Input { label: label.to_string(), report: made_up() });
    let (one, two) = (figures(&[input(made_up())]).0, figures(&inputs).0);
    for (one, two) in one.iter().zip(&two) {
        assert_eq!((one.name.as_str(), one.rows.len() * 2), (two.name.as_str(), two.rows.len()));
        let picture = two.scene.svg("", "", "x");
        assert!(picture.contains("a.json") && picture.contains("b.json"), "{}", two.name);
    }
}

#[test]
fn texts_of_a_picture_do_not_overlap_and_are_large_enough() {
    for figure in figures(&[input(made_up())]).0 {
        let boxes = figure.scene.text_boxes();
        for (index, (text, size, [left, top, right, bottom])) in boxes.iter().enumerate() {
            assert!(*size >= 11.0, "{}: {text}", figure.name);
            for (other, _, [x0, y0, x1, y1]) in &boxes[index + 1..] {
                let apart = right <= x0 || x1 <= left || bottom <= y0 || y1 <= top;
                assert!(apart, "{}: {text} and {other}", figure.name);
            }
        }
    }
}

#[test]
fn a_page_has_every_text_of_a_panel_or_legend_once_and_no_title_twice() {
    let inputs = [input(made_up())];
    for figure in figures(&inputs).0 {
        let (file, page) =
            (figure.scene.svg("", "", "x"), figure.scene.parts(PartKind::Legend) + &figure.scene.parts(PartKind::Panel));
        // Above the parts are the title, the machine and what is the same in all.
        let above = 1 + machines(&inputs).lines().count() + usize::from(!figure.constant.is_empty());
        let count = |svg: &str, what: &str| svg.matches(what).count();
        assert_eq!(count(&page, "<text "), count(&file, "<text ") - above, "{}", figure.name);
        assert_eq!(count(&page, "<path "), count(&file, "<path "), "{}", figure.name);
        assert_eq!(
            count(&page, "</text>\n</svg>") + count(&page, "/>\n</svg>") + count(&page, "</path>\n</svg>"),
            count(&page, "</svg>")
        );
        assert!(!page.contains(&figure.title) || figure.scene.parts(PartKind::Panel).matches("<svg ").count() == 1);
    }
}

#[test]
fn numbers_of_a_table_stand_at_the_right_and_words_at_the_left() {
    let mut page = String::new();
    let row = |cells: [&str; 3]| cells.map(str::to_string).to_vec();
    write_table(&mut page, "", &row(["subject", "median", "reported"]), &[row(["ours", "1 ns", ""]), row(["4 a", "2 ns", "3×"])]);
    assert!(page.contains("<td>ours</td><td class=\"number\">1 ns</td><td class=\"number\"></td>"), "{page}");
    assert!(page.contains("<th scope=\"col\">subject</th><th scope=\"col\" class=\"number\">median</th>"), "{page}");
}

#[test]
fn rows_are_in_the_order_of_panels_and_series() {
    let inputs = [input(made_up())];
    let figure = &figures(&inputs).0[0];
    let rows = figure.rows.iter().map(|row| (row[0].as_str(), row[1].as_str(), row[2].as_str()));
    let expected = [("look-up hit", "ours", "256"), ("look-up hit", "ours", "1,024"), ("look-up hit", "ours", "4,096")];
    assert_eq!(Vec::from_iter(rows.take(3)), expected);
}

#[test]
fn labels_are_left_out_evenly_where_there_is_no_room() {
    let labels = |distance: f64| (0..9).map(|index| (f64::from(index) * distance, "256 KiB".to_string())).collect();
    assert_eq!(figure::spaced(labels(100.0)).len(), 9);
    let places = Vec::from_iter(figure::spaced(labels(40.0)).iter().map(|(place, _)| *place));
    assert_eq!(places, [0.0, 80.0, 160.0, 240.0, 320.0]);
}

#[test]
fn how_many_times_has_as_many_digits_as_its_neighbours() {
    let shown = [0.0123, 0.0996, 0.994, 1.0, 9.994, 17.36, 250.0].map(figure::times);
    assert_eq!(shown, ["0.012×", "0.10×", "0.99×", "1.00×", "9.99×", "17.4×", "250×"]);
}

#[test]
fn one_wild_round_does_not_make_all_bars_small() {
    let ends = |wild: f64| {
        let mut report = made_up();
        for measurement in report.measurements.iter_mut().filter(|measurement| measurement.key.table == Table::Parallel) {
            measurement.samples[0] *= wild;
        }
        let figures = figures(&[input(report)]).0;
        let figure = figures.iter().find(|figure| figure.name.starts_with("parallel")).unwrap();
        Vec::from_iter(figure.scene.text_boxes().into_iter().map(|(text, ..)| text).filter(|text| text.ends_with('×')).take(8))
    };
    assert_eq!(ends(1.0), ends(1000.0));
}

#[test]
fn dates_are_those_of_the_calendar() {
    let shown = [0, 951_782_400, 1_709_164_799, 1_735_689_600].map(date);
    assert_eq!(shown, ["1970-01-01 00:00 UTC", "2000-02-29 00:00 UTC", "2024-02-28 23:59 UTC", "2025-01-01 00:00 UTC"]);
}

#[test]
fn values_have_three_digits_and_a_unit_that_suits_them() {
    let shown = [(22.44, "ns"), (1_999.7, "ns"), (0.25, "us"), (61_000.0, "ms"), (1_234.0, "MB/s"), (3.0, "calls")];
    let shown = shown.map(|(number, unit)| figure::value(number, unit));
    assert_eq!(shown, ["22.4 ns", "2 µs", "250 ns", "61 s", "1.23 GB/s", "3 calls"]);
}

#[test]
fn of_what_differs_in_the_number_of_calls_the_most_are_drawn() {
    let mut report = Report::begin(String::new());
    for (measured, step, sample) in [(64u64, "residency", 1.0), (256, "residency", 2.0), (64, "publishing", 3.0)] {
        let place = [("measured", measured.into()), ("step", step.into())];
        report.add(Key::new(Table::Steps, "register", "ours", &place), "ns", Better::Less, sample);
    }
    let inputs = [Input { label: String::new(), report }];
    let samples: Vec<f64> = figure::points(&inputs, Table::Steps).iter().map(|point| point.measurement.samples[0]).collect();
    assert_eq!(samples, [2.0, 3.0]);
}
