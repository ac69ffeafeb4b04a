import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.stream.Collectors;

/** The JDK's client as it comes: every request that it sends without TLS asks for an Upgrade to h2c. */
public class HttpClientAsks {
    public static void main(String[] arguments) throws Exception {
        String url = arguments[0];
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 1; i < arguments.length; i++) {
            var body = HttpRequest.BodyPublishers.ofString(arguments[i]);
            var request = HttpRequest.newBuilder(URI.create(url + "/v1/completions"))
                .header("content-type", "application/json").POST(body).build();
            var response = client.send(request, BodyHandlers.ofLines());
            String lines = response.body().collect(Collectors.joining("\n"));
            System.out.println(response.statusCode() + " " + response.version() + "\n" + lines + "\n===");
        }
    }
}
