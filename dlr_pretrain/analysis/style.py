"""The looks of every figure: colours of Okabe and Ito (2008), apart for every kind of colour vision, and marks."""

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PINK = "#0072B2", "#D55E00", "#CC79A7"
GREY = "#767676"  # of what only helps the eye
SERIES = (BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY, BLACK)
MARKS = "osD^vPX*"
